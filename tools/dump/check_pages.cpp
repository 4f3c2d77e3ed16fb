#include <vector>

#include "shm/page_word.hpp"
#include "shm/prefix_index.hpp"
#include "tools/dump/checker.hpp"

namespace hicache::inspect {
namespace {

FindingId page_id(const CheckContext& c, FindingKind kind, std::uint32_t page, std::int64_t difference = 0) {
  return {kind, SectionKind::pages, page, PageWord::decode(get(c.t.pages[page].word)).generation.value,
          difference};
}

bool being_filled(PageState s) {
  return s == PageState::reserved || s == PageState::filling;
}

void check_free(const CheckContext& c, std::uint32_t i) {
  const PageEntry& p = c.t.pages[i];
  const PageWord word = PageWord::decode(get(p.word));
  auto complain = [&](const char* what, std::uint64_t value, std::int64_t which) {
    c.out.add(page_id(c, FindingKind::free_page_in_use, i, which), Proof::structure,
              "page {} is free but has {} {:#x}", i, what, value);
  };
  if (word.pins != 0) complain("pins", word.pins, 1);
  if (word.flags != 0) complain("flags", word.flags, 2);
  if (load_key(p) != PrefixHash{}) complain("a key that begins with", get(p.key[0]), 3);
  if (get(p.pool_offset) != 0) complain("pool offset", get(p.pool_offset), 4);
  if (get(p.namespace_id) != kNone32) complain("namespace", get(p.namespace_id), 5);
  if (get(p.parent) != kNone32) complain("parent", get(p.parent), 6);
  if (get(p.children) != 0) complain("children", get(p.children), 7);
  if (get(p.shards_done) != 0) complain("complete shards", get(p.shards_done), 8);
  if (get(p.filler_lease) != kNone32) complain("filler lease", get(p.filler_lease), 9);
  if (get(p.size_class) != kNone32) complain("size class", get(p.size_class), 10);
}

void check_used(const CheckContext& c, std::uint32_t i) {
  const PageEntry& p = c.t.pages[i];
  const PageWord word = PageWord::decode(get(p.word));
  if (word.generation.value == 0) {
    c.out.add(page_id(c, FindingKind::wrong_state, i, 3), Proof::structure, "page {} is {} in generation 0",
              i, to_string(word.state));
  }
  const std::uint32_t ns = get(p.namespace_id);
  const NamespaceEntry* entry = c.used_namespace(ns);
  if (entry == nullptr) {
    c.out.add(page_id(c, FindingKind::unknown_namespace, i), Proof::structure,
              "page {} ({}) is in namespace {}, which is not in use", i, to_string(word.state), ns);
    return;
  }
  if (get(p.size_class) != get(entry->size_class)) {
    c.out.add(page_id(c, FindingKind::wrong_size_class, i), Proof::structure,
              "page {} has size class {}, its namespace {} has {}", i, get(p.size_class), ns,
              get(entry->size_class));
  }
  const std::uint32_t shards = get(entry->shards);
  const std::uint64_t all = shards >= 64 ? ~0ull : (1ull << shards) - 1;
  const std::uint64_t done = get(p.shards_done);
  if ((done & ~all) != 0 || (word.state == PageState::ready && done != all)) {
    c.out.add(page_id(c, FindingKind::incomplete_page, i), Proof::structure,
              "page {} is {} with complete shards {:#x}, expected {:#x}", i, to_string(word.state), done,
              all);
  }
  const std::uint32_t filler = get(p.filler_lease);
  if (being_filled(word.state) && c.used_lease(filler) == nullptr) {
    c.out.add(page_id(c, FindingKind::fill_without_lease, i), Proof::structure,
              "page {} is {} for lease {}, which is not in use", i, to_string(word.state), filler);
  }
  if (word.state == PageState::ready && filler != kNone32) {
    c.out.add(page_id(c, FindingKind::fill_without_lease, i, 1), Proof::structure,
              "page {} is ready but still names lease {} as its filler", i, filler);
  }
}

void check_parent(const CheckContext& c, std::uint32_t i, PageState state) {
  const PageEntry& p = c.t.pages[i];
  const std::uint32_t parent = get(p.parent);
  // A page that leaves may have let go of its parent.
  const bool in_prefix = being_filled(state) || state == PageState::ready;
  if (parent == kNone32) {
    if (in_prefix && get(p.depth) != 0) {
      c.out.add(page_id(c, FindingKind::broken_prefix, i, 1), Proof::structure,
                "page {} is page {} of its prefix but has no parent", i, get(p.depth));
    }
    return;
  }
  if (parent >= c.t.pages.size() || parent == i) {
    c.out.add(page_id(c, FindingKind::broken_prefix, i, 2), Proof::structure,
              "page {} has parent {}, expected another of the {} pages", i, parent, c.t.pages.size());
    return;
  }
  const PageEntry& q = c.t.pages[parent];
  const PageWord parent_word = PageWord::decode(get(q.word));
  if (parent_word.state == PageState::free || parent_word.generation.value != get(p.parent_generation)) {
    c.out.add(page_id(c, FindingKind::broken_prefix, i, 3), Proof::structure,
              "page {} has parent {} of generation {}, which is {} in generation {}", i, parent,
              get(p.parent_generation), to_string(parent_word.state), parent_word.generation.value);
    return;
  }
  if (state == PageState::ready && parent_word.state != PageState::ready) {
    c.out.add(page_id(c, FindingKind::broken_prefix, i, 4), Proof::structure,
              "page {} is ready but its parent {} is {}", i, parent, to_string(parent_word.state));
  }
  if (get(q.namespace_id) != get(p.namespace_id)) {
    c.out.add(page_id(c, FindingKind::broken_prefix, i, 5), Proof::structure,
              "page {} is in namespace {}, its parent {} in namespace {}", i, get(p.namespace_id), parent,
              get(q.namespace_id));
  }
  if (get(p.depth) != get(q.depth) + 1) {
    c.out.add(page_id(c, FindingKind::broken_prefix, i, 6), Proof::structure,
              "page {} is page {} of its prefix, its parent {} is page {}", i, get(p.depth), parent,
              get(q.depth));
  }
}

}  // namespace

void check_pages(const CheckContext& c) {
  for (std::uint32_t i = 0; i < c.t.pages.size(); ++i) {
    const PageWord word = PageWord::decode(get(c.t.pages[i].word));
    if (static_cast<std::uint8_t>(word.state) >= kPageStateCount) {
      c.out.add(page_id(c, FindingKind::wrong_state, i, 1), Proof::structure,
                "page {} has state {}, expected 0 to {}", i, static_cast<unsigned>(word.state),
                kPageStateCount - 1);
    } else if (word.state == PageState::free) {
      check_free(c, i);
    } else {
      check_used(c, i);
    }
  }
}

void check_prefixes(const CheckContext& c) {
  std::vector<std::uint32_t> children(c.t.pages.size());
  for (std::uint32_t i = 0; i < c.t.pages.size(); ++i) {
    const PageWord word = PageWord::decode(get(c.t.pages[i].word));
    if (word.state == PageState::free || static_cast<std::uint8_t>(word.state) >= kPageStateCount) continue;
    check_parent(c, i, word.state);
    const std::uint32_t parent = get(c.t.pages[i].parent);
    if (parent < children.size()) ++children[parent];
  }
  for (std::uint32_t i = 0; i < c.t.pages.size(); ++i) {
    if (PageWord::decode(get(c.t.pages[i].word)).state == PageState::free) continue;
    const std::uint32_t counted = get(c.t.pages[i].children);
    const std::int64_t difference = std::int64_t{counted} - children[i];
    if (difference != 0) {
      c.out.add(page_id(c, FindingKind::wrong_count, i, difference), Proof::count,
                "page {} counts {} children, {} pages name it as their parent", i, counted, children[i]);
    }
  }
}

}  // namespace hicache::inspect
