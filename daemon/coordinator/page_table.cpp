#include "daemon/coordinator/page_table.hpp"

#include <algorithm>
#include <array>
#include <cassert>

#include "shm/crash_points.hpp"
#include "shm/page_seal.hpp"

namespace hicache::daemon {
namespace {
constexpr auto kRelaxed = std::memory_order_relaxed;
}

PageTable::PageTable(const Tables& tables, std::uint64_t segment_bytes, const EvictionPolicy& policy,
                     Stats& stats, const PageSurvey* survey, std::span<const NumaNode> segment_nodes)
    : entries_(tables.pages),
      namespaces_(tables.namespaces),
      header_(tables.header),
      index_(tables, tables.header->hash_seed.load(kRelaxed)),
      slots_(tables.segments, segment_bytes, segment_nodes),
      evictable_(static_cast<std::uint32_t>(tables.pages.size())),
      policy_(policy),
      stats_(stats),
      family_(tables.pages.size()) {
  for (IndexBucket& bucket : tables.index) bucket.head.store(kNone32, kRelaxed);
  std::vector<bool> kept(entries_.size());
  if (survey != nullptr) {
    for (const PageId page : survey->keep) kept[page.value] = true;
    for (const HeldPage& one : survey->held) kept[one.page.value] = true;
  }
  for (NamespaceEntry& ns : namespaces_) ns.resident_pages.store(0, kRelaxed);
  free_.reserve(entries_.size());
  for (std::size_t i = entries_.size(); i-- > 0;) {
    if (kept[i]) continue;
    clear_entry(entries_[i]);
    free_.push_back(PageId{static_cast<std::uint32_t>(i)});
  }
  if (survey != nullptr) {
    for (const PageId page : survey->keep) entries_[page.value].children.store(0, kRelaxed);
    for (const PageId page : survey->keep) adopt(page);
    for (const HeldPage& one : survey->held) adopt_held(one.page);
  }
  stats_.set(Counter::pinned_pages, 0);
  for (const Counter gauge :
       {Counter::storing_pages, Counter::prefetching_pages, Counter::backup_queue_pages})
    stats_.set(gauge, 0);
  stats_.set(Counter::usable_pool_bytes, slots_.usable_bytes());
  stats_.set(Counter::ready_pages, survey != nullptr ? survey->keep.size() : 0);
  header_->use_clock.store(use_clock_, kRelaxed);
  publish_gauges();
}

// Everything but the generation: late messages about the page's earlier lives must not fit its next one.
void PageTable::clear_entry(PageEntry& e) {
  PageWord w;
  w.generation = PageWord::decode(e.word.load(kRelaxed)).generation;
  e.word.store(
      w.encode(),
      std::memory_order_release);  // SYNC page-word: first, so that no reader takes the rest for a page
  for (A64& k : e.key) k.store(0, kRelaxed);
  e.namespace_id.store(kNone32, kRelaxed);
  e.chain_next.store(kNone32, kRelaxed);
  e.parent.store(kNone32, kRelaxed);
  e.parent_generation.store(0, kRelaxed);
  e.children.store(0, kRelaxed);
  e.pool_offset.store(0, kRelaxed);
  e.shards_done.store(0, kRelaxed);
  e.size_class.store(kNone32, kRelaxed);
  e.filler_lease.store(kNone32, kRelaxed);
  e.depth.store(0, kRelaxed);
  e.seal.store(0, kRelaxed);
  e.leased_to.store(0, kRelaxed);
}

// A page that somebody may still write to: nobody's, in its slot, until finish_abort.
void PageTable::adopt_held(PageId page) {
  PageEntry& e = entries_[page.value];
  const NamespaceId ns = namespace_of(page);
  const SizeClassId size_class = slots_.class_for(namespaces_[ns.value].slot_bytes.load(kRelaxed));
  const bool placed = slots_.adopt(size_class, offset(page));
  assert(placed && "the survey checks places by the allocator's rules");
  static_cast<void>(placed);
  PageWord w = word(page);
  w.state = PageState::aborting;
  w.pins = 0;
  w.flags = 0;
  set_word(page, w);
  e.size_class.store(size_class.value, kRelaxed);
  e.filler_lease.store(kNone32, kRelaxed);
  e.chain_next.store(kNone32, kRelaxed);
  e.parent.store(kNone32, kRelaxed);
  e.parent_generation.store(0, kRelaxed);
  e.children.store(0, kRelaxed);
  bump(namespaces_[ns.value].resident_pages);
}

// A page that a survey found sound; its parent has been adopted before.
void PageTable::adopt(PageId page) {
  PageEntry& e = entries_[page.value];
  const NamespaceId ns = namespace_of(page);
  const SizeClassId size_class = slots_.class_for(namespaces_[ns.value].slot_bytes.load(kRelaxed));
  const bool placed = slots_.adopt(size_class, offset(page));
  assert(placed && "the survey checks places by the allocator's rules");
  static_cast<void>(placed);
  e.size_class.store(size_class.value, kRelaxed);
  e.filler_lease.store(kNone32, kRelaxed);
  e.chain_next.store(kNone32, kRelaxed);
  PageWord w = word(page);
  w.pins = 0;
  w.flags = PageWord::kDirty;  // what storage this daemon will have, and what it holds, is not known
  set_word(page, w);
  index_.insert(page, index_.bucket_of(load_key(e), ns));
  bump(namespaces_[ns.value].resident_pages);
  use_clock_ = std::max(use_clock_, e.last_use.load(kRelaxed));
  if (const PageId up = parent(page)) link_child(up, page);
  update_evictable(page);
}

PageId PageTable::find(const PrefixHash& key, NamespaceId ns) const {
  return index_.find(key, ns, index_.bucket_of(key, ns));
}

void PageTable::find_leading_ready(std::span<const PrefixHash> keys, NamespaceId ns,
                                   std::vector<PageId>& out) const {
  constexpr std::size_t kBatch = 16;  // cache misses of one batch overlap
  std::array<std::uint64_t, kBatch> buckets;
  for (std::size_t base = 0; base < keys.size(); base += kBatch) {
    const std::size_t n = std::min(kBatch, keys.size() - base);
    for (std::size_t i = 0; i < n; ++i) {
      buckets[i] = index_.bucket_of(keys[base + i], ns);
      index_.prefetch_bucket(buckets[i]);
    }
    for (std::size_t i = 0; i < n; ++i) index_.prefetch_page(buckets[i]);
    for (std::size_t i = 0; i < n; ++i) {
      const PageId page = index_.find(keys[base + i], ns, buckets[i]);
      if (!page || state(page) != PageState::ready) return;
      out.push_back(page);
    }
  }
}

void PageTable::set_word(PageId page, PageWord word) {
  // SYNC page-word (prefix_index.hpp): key, offset and shard bytes are in place before the state says so.
  entries_[page.value].word.store(word.encode(), std::memory_order_release);
}

void PageTable::move_to(PageId page, PageState next) {
  PageWord w = word(page);
  assert(is_page_transition(w.state, next));
  w.state = next;
  set_word(page, w);
}

void PageTable::link_child(PageId parent, PageId child) {
  Family& f = family_[child.value];
  f.previous = PageId::none();
  f.next = family_[parent.value].first_child;
  if (f.next) family_[f.next.value].previous = child;
  family_[parent.value].first_child = child;
  bump(entries_[parent.value].children);
  update_evictable(parent);
}

void PageTable::unlink_child(PageId child) {
  PageEntry& e = entries_[child.value];
  const PageId up{e.parent.load(kRelaxed)};
  if (!up) return;
  Family& f = family_[child.value];
  if (f.previous) {
    family_[f.previous.value].next = f.next;
  } else {
    family_[up.value].first_child = f.next;
  }
  if (f.next) family_[f.next.value].previous = f.previous;
  f.next = f.previous = PageId::none();
  e.parent.store(kNone32, kRelaxed);
  e.parent_generation.store(0, kRelaxed);
  lower(entries_[up.value].children);
  update_evictable(up);
}

PageUse PageTable::use_of(PageId page) const {
  return {entries_[page.value].last_use.load(kRelaxed), entries_[page.value].uses.load(kRelaxed)};
}

void PageTable::update_evictable(PageId page) {
  const PageEntry& e = entries_[page.value];
  const PageWord w = word(page);
  const bool wanted = w.state == PageState::ready && w.pins == 0 && e.children.load(kRelaxed) == 0 &&
                      (w.flags & PageWord::kStoring) == 0;
  if (wanted == evictable_.contains(page)) return;
  const SizeClassId size_class{e.size_class.load(kRelaxed)};
  if (wanted) {
    evictable_.insert(page, size_class, policy_.rank(use_of(page)));
  } else {
    evictable_.erase(page, size_class);
  }
}

PoolOffset PageTable::take_slot(const NewPage& page) {
  PoolOffset slot = slots_.allocate(page.size_class, page.near, page.node);
  if (slot) return slot;
  // The class is full. Its own oldest page makes room with one eviction, unless another class holds an older
  // one: then the old class gives pages until one of its segments is empty, within reason.
  std::uint32_t budget = 4 * std::max(1u, slots_.slots_per_span(page.size_class)) + 1024;
  while (!slot) {
    PageId victim = victim_on_demand();
    if (!victim) return PoolOffset::none();
    if (budget-- == 0) {
      const PageId own = victim_on_demand(page.size_class);
      if (own) victim = own;
      budget = 1;
    }
    evict(victim, EvictReason::demand);
    if (slots_.can_allocate(page.size_class))
      slot = slots_.allocate(page.size_class, PoolOffset::none(), page.node);
  }
  return slot;
}

// The page that makes room now, of any size class or of one. What is written back first is passed over, but
// not more than a few pages of it: whoever needs the room does without it then.
PageId PageTable::victim_on_demand(SizeClassId of) {
  constexpr std::uint32_t kMostPassedOver = 32;
  for (std::uint32_t passed = 0; passed < kMostPassedOver; ++passed) {
    const PageId victim = of ? evictable_.first(of) : evictable_.first();
    if (victim && (!write_back_ || !write_back_(victim))) return victim;
    if (!victim) break;
  }
  if (!of && stats_.get(Counter::storing_pages) != 0) stats_.add(Counter::storing_refusals);
  return PageId::none();
}

PageId PageTable::allocate(const NewPage& page) {
  if (free_.empty()) {
    const PageId victim = victim_on_demand();
    if (!victim) return PageId::none();
    evict(victim, EvictReason::demand);
  }
  const PoolOffset slot = take_slot(page);
  if (!slot) return PageId::none();
  assert(!free_.empty());
  const PageId id = free_.back();
  free_.pop_back();

  PageEntry& e = entries_[id.value];
  PageWord w = word(id);
  assert(w.state == PageState::free && w.pins == 0);
  // Generation 0 means "never used": skip it when the counter wraps.
  w.generation = Generation{w.generation.value + 1 == 0 ? 1 : w.generation.value + 1};
  w.state = PageState::reserved;
  w.flags =
      static_cast<std::uint8_t>((page.dirty ? PageWord::kDirty : 0) | (page.states ? PageWord::kStates : 0));
  set_word(id, w);
  HICACHE_CRASH_POINT(admit_reserved);
  for (std::size_t i = 0; i < 4; ++i) e.key[i].store(page.key.words[i], kRelaxed);
  e.namespace_id.store(page.namespace_id.value, kRelaxed);
  e.pool_offset.store(slot.value, kRelaxed);
  e.size_class.store(page.size_class.value, kRelaxed);
  e.filler_lease.store(page.filler.value, kRelaxed);
  e.depth.store(page.depth, kRelaxed);
  e.shards_done.store(0, kRelaxed);
  e.last_use.store(0, kRelaxed);
  e.uses.store(0, kRelaxed);
  if (page.parent) {
    e.parent.store(page.parent.value, kRelaxed);
    e.parent_generation.store(word(page.parent).generation.value, kRelaxed);
    link_child(page.parent, id);
  }
  move_to(id, PageState::filling);
  HICACHE_CRASH_POINT(admit_linked);
  index_.insert(id, index_.bucket_of(page.key, page.namespace_id));
  bump(namespaces_[page.namespace_id.value].resident_pages);
  publish_gauges();
  return id;
}

bool PageTable::complete_shard(PageId page, std::uint32_t shard, std::uint32_t shards) {
  A64& done = entries_[page.value].shards_done;
  const std::uint64_t all = shards == 64 ? ~0ull : (1ull << shards) - 1;
  const std::uint64_t before = done.load(kRelaxed);
  const std::uint64_t after = before | (1ull << shard);
  done.store(after, kRelaxed);
  HICACHE_CRASH_POINT(publish_shard);
  return before != after && after == all;
}

bool PageTable::publishable(PageId page, std::uint32_t shards) const {
  const PageEntry& e = entries_[page.value];
  const std::uint64_t all = shards == 64 ? ~0ull : (1ull << shards) - 1;
  if (state(page) != PageState::filling || e.shards_done.load(kRelaxed) != all) return false;
  const PageId up = parent(page);
  return !up || state(up) == PageState::ready;
}

void PageTable::complete_shards(PageId page, std::uint32_t shards) {
  entries_[page.value].shards_done.store(shards == 64 ? ~0ull : (1ull << shards) - 1, kRelaxed);
}

void PageTable::set_filler(PageId page, LeaseSlot filler) {
  assert(state(page) == PageState::filling);
  entries_[page.value].filler_lease.store(filler.value, kRelaxed);
}

void PageTable::lease_to(PageId page, std::uint64_t pool_tag) {
  assert(state(page) == PageState::filling);
  // Release: where the page lies comes before the word that makes it count after this daemon's death.
  entries_[page.value].leased_to.store(pool_tag, std::memory_order_release);
}

void PageTable::publish(PageId page, PageSource source) {
  PageEntry& e = entries_[page.value];
  e.leased_to.store(0, kRelaxed);
  e.filler_lease.store(kNone32, kRelaxed);
  e.seal.store(page_seal(e), kRelaxed);
  HICACHE_CRASH_POINT(publish_sealed);
  move_to(page, PageState::ready);
  if (source == PageSource::device) {
    bump(namespaces_[namespace_of(page).value].written);
    stats_.add(Counter::written);
  } else {
    stats_.add(Counter::prefetched);
  }
  stats_.add(Counter::ready_pages);
  update_evictable(page);
}

void PageTable::abort(PageId page) {
  assert(entries_[page.value].children.load(kRelaxed) == 0);
  const bool was_indexed =
      index_.erase(page, index_.bucket_of(load_key(entries_[page.value]), namespace_of(page)));
  assert(was_indexed);
  static_cast<void>(was_indexed);
  HICACHE_CRASH_POINT(abort_unindexed);
  move_to(page, PageState::aborting);
  entries_[page.value].filler_lease.store(kNone32, kRelaxed);
  unlink_child(page);
  stats_.add(Counter::aborted);
}

void PageTable::finish_abort(PageId page) {
  release(page);
}

void PageTable::release(PageId page) {
  PageEntry& e = entries_[page.value];
  slots_.free(SizeClassId{e.size_class.load(kRelaxed)}, offset(page));
  HICACHE_CRASH_POINT(evict_freed);
  lower(namespaces_[namespace_of(page).value].resident_pages);
  PageWord w = word(page);
  assert(is_page_transition(w.state, PageState::free) && w.pins == 0);
  w.state = PageState::free;
  w.flags = 0;
  set_word(page, w);
  for (A64& k : e.key) k.store(0, kRelaxed);
  e.namespace_id.store(kNone32, kRelaxed);
  e.pool_offset.store(0, kRelaxed);
  e.size_class.store(kNone32, kRelaxed);
  e.shards_done.store(0, kRelaxed);
  e.depth.store(0, kRelaxed);
  e.seal.store(0, kRelaxed);
  e.leased_to.store(0, kRelaxed);
  free_.push_back(page);
  publish_gauges();
}

void PageTable::set_flag(PageId page, std::uint8_t flag, bool on) {
  PageWord w = word(page);
  w.flags = static_cast<std::uint8_t>(on ? w.flags | flag : w.flags & ~flag);
  set_word(page, w);
}

void PageTable::set_storing(PageId page, bool storing) {
  assert(storing ? state(page) == PageState::ready : this->storing(page));
  set_flag(page, PageWord::kStoring, storing);
  if (storing) {
    stats_.add(Counter::storing_pages);
  } else {
    stats_.sub(Counter::storing_pages);
  }
  const PageWord w = word(page);
  if (!storing && w.state == PageState::evicting && w.pins == 0) {
    if ((w.flags & PageWord::kQuarantined) == 0) release(page);
  } else {
    update_evictable(page);
  }
}

void PageTable::clear_dirty(PageId page) {
  if (state(page) == PageState::ready) set_flag(page, PageWord::kDirty, false);
}

void PageTable::mark_all_dirty() {
  for (std::uint32_t i = 0; i < entries_.size(); ++i) {
    if (state(PageId{i}) == PageState::ready) set_flag(PageId{i}, PageWord::kDirty, true);
  }
}

std::uint64_t PageTable::pin_cost(SizeClassId size_class) const {
  return std::max(slots_.slot_bytes(size_class), slots_.pool_bytes() / capacity());
}

void PageTable::pin(PageId page) {
  PageWord w = word(page);
  assert(w.pins < PageWord::kMaxPins);
  ++w.pins;
  set_word(page, w);
  if (w.pins == 1) update_evictable(page);
  stats_.add(Counter::pinned_pages);
}

void PageTable::unpin(PageId page) {
  PageWord w = word(page);
  assert(w.pins > 0);
  --w.pins;
  set_word(page, w);
  stats_.sub(Counter::pinned_pages);
  if (w.pins != 0) return;
  if (w.state == PageState::evicting) {
    if ((w.flags & (PageWord::kQuarantined | PageWord::kStoring)) == 0) release(page);
  } else {
    update_evictable(page);
  }
}

void PageTable::stamp(PageId page) {
  PageEntry& e = entries_[page.value];
  const bool was_evictable = evictable_.contains(page);
  if (was_evictable) evictable_.erase(page, SizeClassId{e.size_class.load(kRelaxed)});
  e.last_use.store(++use_clock_, kRelaxed);
  header_->use_clock.store(use_clock_, kRelaxed);
  bump(e.uses);
  if (was_evictable) update_evictable(page);
}

bool PageTable::evict_one(EvictReason reason) {
  const PageId victim = evictable_.first();
  if (!victim) return false;
  evict(victim, reason);
  return true;
}

void PageTable::evict(PageId page, EvictReason reason) {
  PageEntry& e = entries_[page.value];
  assert(evictable_.contains(page));
  if (dirty(page)) stats_.add(Counter::evicted_dirty);
  evictable_.erase(page, SizeClassId{e.size_class.load(kRelaxed)});
  move_to(page, PageState::evicting);
  HICACHE_CRASH_POINT(evict_marked);
  const bool was_indexed = index_.erase(page, index_.bucket_of(load_key(e), namespace_of(page)));
  assert(was_indexed);
  static_cast<void>(was_indexed);
  HICACHE_CRASH_POINT(evict_unindexed);
  unlink_child(page);
  bump(namespaces_[namespace_of(page).value].evicted);
  stats_.sub(Counter::ready_pages);
  stats_.add(Counter::evicted);
  stats_.add(reason == EvictReason::demand      ? Counter::evicted_demand
             : reason == EvictReason::watermark ? Counter::evicted_watermark
                                                : Counter::evicted_request);
  release(page);
}

void PageTable::condemn(PageId page, bool quarantine) {
  PageEntry& e = entries_[page.value];
  assert(e.children.load(kRelaxed) == 0);
  evictable_.erase(page, SizeClassId{e.size_class.load(kRelaxed)});
  PageWord w = word(page);
  assert(is_page_transition(w.state, PageState::evicting));
  w.state = PageState::evicting;
  if (quarantine) w.flags = static_cast<std::uint8_t>(w.flags | PageWord::kQuarantined);
  set_word(page, w);
  const bool was_indexed = index_.erase(page, index_.bucket_of(load_key(e), namespace_of(page)));
  assert(was_indexed);
  static_cast<void>(was_indexed);
  unlink_child(page);
  stats_.sub(Counter::ready_pages);
  if (!quarantine) {
    bump(namespaces_[namespace_of(page).value].evicted);
    stats_.add(Counter::evicted);
    stats_.add(Counter::evicted_request);
  }
  if (w.pins == 0 && !quarantine && (w.flags & PageWord::kStoring) == 0) release(page);
}

void PageTable::publish_gauges() {
  stats_.set(Counter::resident_pages, resident());
  stats_.set(Counter::used_pool_bytes, slots_.used_bytes());
  stats_.set(Counter::assigned_segments, slots_.assigned_segments());
}

}  // namespace hicache::daemon
