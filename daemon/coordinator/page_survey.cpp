#include "daemon/coordinator/page_survey.hpp"

#include <algorithm>
#include <tuple>

#include "shm/page_seal.hpp"
#include "shm/page_word.hpp"
#include "shm/prefix_index.hpp"
#include "shm/process.hpp"
#include "shm/protocol.hpp"

namespace hicache::daemon {
namespace {

constexpr std::size_t kMaxFindings = 8;

template <class Atomic>
auto get(const Atomic& a) {
  return a.load(std::memory_order_relaxed);
}

class Surveyor {
 public:
  Surveyor(const ConstTables& tables, std::uint64_t pool_bytes, std::uint64_t segment_bytes)
      : t_(tables),
        pool_bytes_(pool_bytes),
        segment_bytes_(segment_bytes),
        wanted_(tables.pages.size()),
        held_(tables.pages.size()) {
    survey_.namespaces.resize(t_.namespaces.size());
  }

  PageSurvey run() {
    for (std::uint32_t i = 0; i < t_.namespaces.size(); ++i) survey_.namespaces[i] = sound_namespace(i);
    drop_twin_namespaces();
    find_mappers();
    for (std::uint32_t i = 0; i < t_.pages.size(); ++i) look_at(i);
    drop_overlaps();
    drop_twins();
    drop_mixed_segments();
    keep_whole_prefixes();
    for (std::uint32_t i = 0; i < held_.size(); ++i) {
      if (held_[i]) survey_.held.push_back({PageId{i}, get(t_.pages[i].leased_to)});
    }
    return std::move(survey_);
  }

 private:
  bool sound_namespace(std::uint32_t i) const {
    const NamespaceEntry& e = t_.namespaces[i];
    const auto state = static_cast<NamespaceState>(get(e.state));
    if (state != NamespaceState::active && state != NamespaceState::retired) return false;
    const std::uint64_t stride = get(e.shard_stride);
    const std::uint64_t slot = get(e.slot_bytes);
    const std::uint32_t shards = get(e.shards);
    const std::uint64_t bytes = get(e.shard_bytes);
    const std::uint32_t layers = get(e.layers);
    return shards >= 1 && shards <= kMaxTpSize && bytes > 0 && bytes <= kMaxShardBytes &&
           stride == align_up(bytes, kPoolAlignment) && slot == stride * shards && slot <= kGiB &&
           slot <= pool_bytes_ && get(e.page_tokens) > 0 && layers > 0 && layers <= kMaxLayers;
  }

  // Two active entries with one digest: nobody can say which is right.
  void drop_twin_namespaces() {
    for (std::uint32_t i = 0; i < t_.namespaces.size(); ++i) {
      for (std::uint32_t j = 0; j < i && survey_.namespaces[i]; ++j) {
        if (!survey_.namespaces[j] || get(t_.namespaces[i].state) != get(t_.namespaces[j].state)) continue;
        bool same = get(t_.namespaces[i].state) == static_cast<std::uint32_t>(NamespaceState::active);
        for (std::size_t w = 0; w < 4; ++w) {
          same = same && get(t_.namespaces[i].digest[w]) == get(t_.namespaces[j].digest[w]);
        }
        if (same) survey_.namespaces[i] = survey_.namespaces[j] = false;
      }
    }
  }

  // Processes that an earlier daemon let map the pool. A zombie whose threads still run counts as living.
  void find_mappers() {
    for (std::uint32_t i = 0; i < t_.clients.size(); ++i) {
      const ClientEntry& e = t_.clients[i];
      if (get(e.state) == static_cast<std::uint32_t>(ClientState::free) || get(e.pool_tag) == 0) continue;
      if (await_process_end(ProcessIdentity{get(e.pid), get(e.start_ticks)}, 0)) continue;
      survey_.mappers.push_back(ClientSlot{i});
    }
  }

  [[nodiscard]] bool may_be_written(const PageEntry& p, PageState state) const {
    if (state != PageState::filling && state != PageState::aborting) return false;
    const std::uint64_t tag = get(p.leased_to);
    return tag != 0 && std::any_of(survey_.mappers.begin(), survey_.mappers.end(), [&](ClientSlot slot) {
             return get(t_.clients[slot.value].pool_tag) == tag;
           });
  }

  void complain(std::uint32_t page, const std::string& what) {
    ++survey_.inconsistent;
    wanted_[page] = held_[page] = false;
    if (survey_.findings.size() < kMaxFindings) {
      survey_.findings.push_back("page " + std::to_string(page) + " " + what);
    }
  }

  void look_at(std::uint32_t i) {
    const PageEntry& p = t_.pages[i];
    const PageWord word = PageWord::decode(get(p.word));
    if (word.state == PageState::free) return;
    const bool held = may_be_written(p, word.state);
    if (word.state != PageState::ready && !held) {
      ++survey_.half_written;
      return;
    }
    if (!held) ++survey_.ready;
    if (word.generation.value == 0) {
      return complain(i, "has an impossible page word");
    }
    if (!held && get(p.seal) != page_seal(p)) return complain(i, "does not agree with its seal");
    const std::uint32_t ns = get(p.namespace_id);
    if (ns >= survey_.namespaces.size() || !survey_.namespaces[ns]) {
      return complain(i, "is in namespace " + std::to_string(ns) + ", whose entry is not sound");
    }
    const NamespaceEntry& e = t_.namespaces[ns];
    const std::uint64_t slot_bytes = get(e.slot_bytes);
    const std::uint64_t offset = get(p.pool_offset);
    if (offset % kPoolAlignment != 0 || offset > pool_bytes_ - slot_bytes) {
      return complain(
          i, "lies at pool offset " + std::to_string(offset) + ", outside the pool or off its lines");
    }
    const std::uint32_t shards = get(e.shards);
    const std::uint64_t all = shards == 64 ? ~0ull : (1ull << shards) - 1;
    if (!held && get(p.shards_done) != all) return complain(i, "is ready without all its shards");
    if (!well_placed(offset, slot_bytes)) {
      return complain(i,
                      "lies at pool offset " + std::to_string(offset) + ", where no slot of its size begins");
    }
    held_[i] = held;
    if (held) return;
    // Nobody can ask for pages of a retired namespace any more.
    wanted_[i] = get(e.state) == static_cast<std::uint32_t>(NamespaceState::active);
    if (!wanted_[i]) ++survey_.orphans;
  }

  // The slot allocator's rule: equal slots from the start of a segment, or one slot in a span of segments.
  [[nodiscard]] bool well_placed(std::uint64_t offset, std::uint64_t slot_bytes) const {
    const std::uint64_t inside = offset % segment_bytes_;
    const std::uint64_t span = (slot_bytes + segment_bytes_ - 1) / segment_bytes_;
    if (inside % slot_bytes != 0 || inside / slot_bytes >= span * segment_bytes_ / slot_bytes) return false;
    return offset / segment_bytes_ % (kGiB / segment_bytes_) + span <= kGiB / segment_bytes_ &&
           offset / segment_bytes_ + span <= pool_bytes_ / segment_bytes_;
  }

  [[nodiscard]] std::uint64_t slot_bytes_of(std::uint32_t page) const {
    return get(t_.namespaces[get(t_.pages[page].namespace_id)].slot_bytes);
  }
  [[nodiscard]] std::vector<std::uint32_t> wanted_pages() const {
    std::vector<std::uint32_t> list;
    for (std::uint32_t i = 0; i < wanted_.size(); ++i) {
      if (wanted_[i]) list.push_back(i);
    }
    return list;
  }
  // Those that have a slot: a held page keeps it.
  [[nodiscard]] std::vector<std::uint32_t> placed_pages() const {
    std::vector<std::uint32_t> list;
    for (std::uint32_t i = 0; i < wanted_.size(); ++i) {
      if (wanted_[i] || held_[i]) list.push_back(i);
    }
    return list;
  }

  // Two pages that claim the same bytes: at most one is right, and nobody can say which.
  void drop_overlaps() {
    auto list = placed_pages();
    std::sort(list.begin(), list.end(), [this](std::uint32_t a, std::uint32_t b) {
      return get(t_.pages[a].pool_offset) < get(t_.pages[b].pool_offset);
    });
    std::uint64_t end = 0;
    std::uint32_t reaches_furthest = 0;
    for (const std::uint32_t page : list) {
      const std::uint64_t offset = get(t_.pages[page].pool_offset);
      if (offset < end) {
        if (wanted_[reaches_furthest] || held_[reaches_furthest])
          complain(reaches_furthest, "shares its bytes with another page");
        complain(page, "shares its bytes with another page");
      }
      if (offset + slot_bytes_of(page) > end) {
        end = offset + slot_bytes_of(page);
        reaches_furthest = page;
      }
    }
  }

  // Two pages of one key in one namespace.
  void drop_twins() {
    auto list = wanted_pages();
    const auto identity = [this](std::uint32_t page) {
      return std::tuple(load_key(t_.pages[page]).words, get(t_.pages[page].namespace_id));
    };
    std::sort(list.begin(), list.end(),
              [&](std::uint32_t a, std::uint32_t b) { return identity(a) < identity(b); });
    for (std::size_t i = 1; i < list.size(); ++i) {
      if (identity(list[i]) != identity(list[i - 1])) continue;
      if (wanted_[list[i - 1]]) complain(list[i - 1], "has the key of another page");
      complain(list[i], "has the key of another page");
    }
  }

  // A segment serves one size of slots; where pages disagree, the first one decides.
  void drop_mixed_segments() {
    std::vector<std::uint64_t> slot_size(t_.segments.size());
    for (const std::uint32_t page : placed_pages()) {
      const std::uint64_t slot_bytes = slot_bytes_of(page);
      const std::uint64_t first = get(t_.pages[page].pool_offset) / segment_bytes_;
      const std::uint64_t span = (slot_bytes + segment_bytes_ - 1) / segment_bytes_;
      bool fits = first + span <= slot_size.size();
      for (std::uint64_t s = first; fits && s < first + span; ++s) {
        fits = slot_size[s] == 0 || (span == 1 && slot_size[s] == slot_bytes);
      }
      if (!fits) {
        complain(page, "lies in a segment of another slot size");
        continue;
      }
      for (std::uint64_t s = first; s < first + span; ++s) slot_size[s] = slot_bytes;
    }
  }

  // Parents first, so that a page is kept only below kept pages.
  void keep_whole_prefixes() {
    auto list = wanted_pages();
    std::sort(list.begin(), list.end(), [this](std::uint32_t a, std::uint32_t b) {
      return std::tuple(get(t_.pages[a].depth), a) < std::tuple(get(t_.pages[b].depth), b);
    });
    std::vector<bool> kept(t_.pages.size());
    for (const std::uint32_t page : list) {
      const PageEntry& p = t_.pages[page];
      const std::uint32_t parent = get(p.parent);
      if (parent == kNone32) {
        if (get(p.depth) != 0) {
          complain(page, "is in the middle of a prefix but has no parent");
          continue;
        }
      } else {
        if (parent >= kept.size() || !kept[parent]) {
          ++survey_.orphans;
          continue;
        }
        const PageEntry& q = t_.pages[parent];
        if (PageWord::decode(get(q.word)).generation.value != get(p.parent_generation) ||
            get(q.namespace_id) != get(p.namespace_id) || get(q.depth) + 1 != get(p.depth)) {
          complain(page, "does not fit its parent, page " + std::to_string(parent));
          continue;
        }
      }
      kept[page] = true;
      survey_.keep.push_back(PageId{page});
    }
  }

  const ConstTables& t_;
  std::uint64_t pool_bytes_;
  std::uint64_t segment_bytes_;
  std::vector<bool> wanted_;
  std::vector<bool> held_;
  PageSurvey survey_;
};

}  // namespace

PageSurvey survey_pages(const ConstTables& tables, std::uint64_t pool_bytes, std::uint64_t segment_bytes) {
  return Surveyor(tables, pool_bytes, segment_bytes).run();
}

}  // namespace hicache::daemon
