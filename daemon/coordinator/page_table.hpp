// The page table: every change of a page's state happens here, together with the index, the pool slot, the
// parent's child count and the set of evictable pages, so that they cannot disagree.
//
// Thread safety: none; the coordinator's own.
//
// Invariants
//   1. A page is in the index exactly while it is filling or ready.
//   2. A ready page's parent is ready: publication goes in prefix order and eviction in reverse.
//   3. A page is evictable exactly while it is ready, has no pins and no children, and storage does not read
//   it.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "daemon/coordinator/page_survey.hpp"
#include "daemon/coordinator/slot_allocator.hpp"
#include "daemon/coordinator/stats.hpp"
#include "daemon/eviction/evictable_pages.hpp"
#include "daemon/eviction/policy.hpp"
#include "shm/page_word.hpp"
#include "shm/prefix_index.hpp"
#include "shm/region.hpp"

namespace hicache::daemon {

// Where a new page belongs.
struct NewPage {
  PrefixHash key;
  NamespaceId namespace_id;
  SizeClassId size_class;
  PageId parent;  // none for a request's first page
  std::uint32_t depth = 0;
  LeaseSlot filler;
  PoolOffset near;      // slot of the previous page of the request, or none
  NumaNode node;        // that its copies go to and come from, or none
  bool dirty = true;    // no storage is known to hold it
  bool states = false;  // it is written with the states of its trailing pools
};

// Who filled a page.
enum class PageSource { device, storage };

enum class EvictReason { demand, watermark, request };

class PageTable {
 public:
  // With a survey, the pages it names are kept and everything derived from them (index, slots, children,
  // eviction order, free list) is rebuilt; all others become free. Without one, the table starts empty.
  PageTable(const Tables& tables, std::uint64_t segment_bytes, const EvictionPolicy& policy, Stats& stats,
            const PageSurvey* survey = nullptr, std::span<const NumaNode> segment_nodes = {});

  // The page with this key, filling or ready, or none.
  [[nodiscard]] PageId find(const PrefixHash& key, NamespaceId ns) const;
  // Finds the leading pages that are ready, at most keys.size(), into `out`.
  void find_leading_ready(std::span<const PrefixHash> keys, NamespaceId ns, std::vector<PageId>& out) const;

  // Takes a free page, gives it a slot and a key, and puts it in the index as filling. Evicts what is needed,
  // at most one page unless other size classes hold the pool. None when nothing can be evicted now.
  PageId allocate(const NewPage& page);
  // Marks one shard complete. True when it was the last of `shards`.
  bool complete_shard(PageId page, std::uint32_t shard, std::uint32_t shards);
  // True when every shard is complete and the parent, if any, is ready.
  [[nodiscard]] bool publishable(PageId page, std::uint32_t shards) const;
  // Marks all of them complete.
  void complete_shards(PageId page, std::uint32_t shards);
  // filling -> ready.
  void publish(PageId page, PageSource source = PageSource::device);
  // Another lease answers for the fill from now on. Precondition: filling.
  void set_filler(PageId page, LeaseSlot filler);
  // Kernels of the ranks with this tag may write to the page from now on, until it is ready or free: what a
  // daemon that takes the region over must know. Precondition: filling.
  void lease_to(PageId page, std::uint64_t pool_tag);
  // filling -> aborting: out of the index at once, its slot stays until finish_abort. Precondition: no
  // children.
  void abort(PageId page);
  // aborting -> free, when no copy can land in its slot any more.
  void finish_abort(PageId page);

  // Takes a ready page out of sight at once, pinned or not: no lookup finds it any more, and it is freed when
  // its last pin goes. With `quarantine` it is never freed: nobody may get its slot. Precondition: ready, no
  // children.
  void condemn(PageId page, bool quarantine);

  // Storage reads the page's bytes, or does no more. While it does, the page is not evicted, and should it be
  // condemned, its slot stays. Precondition of the first: ready.
  void set_storing(PageId page, bool storing);
  // Storage holds the page. Nothing happens when it is no longer ready.
  void clear_dirty(PageId page);
  // No storage is known to hold any page from now on.
  void mark_all_dirty();

  // What a pin on a page of this size class keeps from others, in bytes of the pool: its slot, or its part of
  // the page table where that runs out before the pool does.
  [[nodiscard]] std::uint64_t pin_cost(SizeClassId size_class) const;
  [[nodiscard]] std::uint64_t pin_cost(PageId page) const {
    return pin_cost(SizeClassId{entries_[page.value].size_class.load(std::memory_order_relaxed)});
  }
  void pin(PageId page);
  void unpin(PageId page);
  // Gives the page the next use stamp and counts one more use.
  void stamp(PageId page);

  // `write_back` is asked before a page is evicted because its room is needed at once. True: the page is
  // being written back and is not evictable any more, so that another one has to go.
  void set_write_back(std::function<bool(PageId)> write_back) { write_back_ = std::move(write_back); }
  // Evicts the first evictable page. False when there is none.
  bool evict_one(EvictReason reason);
  // Evicts a given page. Precondition: it is evictable.
  void evict(PageId page, EvictReason reason);
  [[nodiscard]] bool evictable(PageId page) const { return evictable_.contains(page); }
  // The page that would be evicted next, or none.
  [[nodiscard]] PageId next_victim() const { return evictable_.first(); }
  [[nodiscard]] std::size_t evictable_count() const { return evictable_.size(); }

  // Calls `visit` with every child; children may be removed by the call.
  template <class Visit>
  void for_each_child(PageId page, Visit&& visit) const {
    for (PageId child = family_[page.value].first_child; child;) {
      const PageId next = family_[child.value].next;
      visit(child);
      child = next;
    }
  }

  // Cache misses of pages that are about to be changed overlap: the entry of a page, and what find() and
  // allocate() touch for a key. Nothing but a hint.
  void prefetch(PageId page) const {
    __builtin_prefetch(&entries_[page.value].word, 1);
    __builtin_prefetch(&entries_[page.value].shards_done, 1);
    __builtin_prefetch(&family_[page.value], 1);
  }
  void prefetch(const PrefixHash& key, NamespaceId ns) const {
    index_.prefetch_bucket(index_.bucket_of(key, ns));
  }
  // The page that allocate() will take after `ahead` others.
  void prefetch_free(std::size_t ahead) const {
    if (ahead < free_.size()) prefetch(free_[free_.size() - 1 - ahead]);
  }

  [[nodiscard]] PageWord word(PageId page) const {
    return PageWord::decode(entries_[page.value].word.load(std::memory_order_relaxed));
  }
  [[nodiscard]] PageState state(PageId page) const { return word(page).state; }
  [[nodiscard]] bool has_states(PageId page) const { return (word(page).flags & PageWord::kStates) != 0; }
  [[nodiscard]] PoolOffset offset(PageId page) const {
    return PoolOffset{entries_[page.value].pool_offset.load(std::memory_order_relaxed)};
  }
  [[nodiscard]] NamespaceId namespace_of(PageId page) const {
    return NamespaceId{entries_[page.value].namespace_id.load(std::memory_order_relaxed)};
  }
  [[nodiscard]] std::uint32_t depth(PageId page) const {
    return entries_[page.value].depth.load(std::memory_order_relaxed);
  }
  [[nodiscard]] PageId parent(PageId page) const {
    return PageId{entries_[page.value].parent.load(std::memory_order_relaxed)};
  }
  [[nodiscard]] bool dirty(PageId page) const { return (word(page).flags & PageWord::kDirty) != 0; }
  [[nodiscard]] bool storing(PageId page) const { return (word(page).flags & PageWord::kStoring) != 0; }
  [[nodiscard]] std::uint32_t uses(PageId page) const {
    return entries_[page.value].uses.load(std::memory_order_relaxed);
  }
  [[nodiscard]] std::uint32_t capacity() const { return static_cast<std::uint32_t>(entries_.size()); }
  [[nodiscard]] std::uint32_t resident() const {
    return capacity() - static_cast<std::uint32_t>(free_.size());
  }
  [[nodiscard]] SlotAllocator& slots() { return slots_; }
  [[nodiscard]] const SlotAllocator& slots() const { return slots_; }

 private:
  // Children of a page as a doubly linked list, private: it can be rebuilt from the parents.
  struct Family {
    PageId first_child;
    PageId next;
    PageId previous;
  };

  void set_word(PageId page, PageWord word);
  void set_flag(PageId page, std::uint8_t flag, bool on);
  void move_to(PageId page, PageState next);
  void link_child(PageId parent, PageId child);
  void unlink_child(PageId child);
  void update_evictable(PageId page);
  [[nodiscard]] PoolOffset take_slot(const NewPage& page);
  [[nodiscard]] PageId victim_on_demand(SizeClassId of = SizeClassId::none());
  void release(PageId page);
  static void clear_entry(PageEntry& entry);
  void adopt(PageId page);
  void adopt_held(PageId page);
  [[nodiscard]] PageUse use_of(PageId page) const;
  void publish_gauges();

  std::span<PageEntry> entries_;
  std::span<NamespaceEntry> namespaces_;
  RegionHeader* header_;
  IndexWriter index_;
  SlotAllocator slots_;
  EvictablePages evictable_;
  const EvictionPolicy& policy_;
  Stats& stats_;
  std::vector<PageId> free_;
  std::vector<Family> family_;
  std::uint64_t use_clock_ = 0;
  std::function<bool(PageId)> write_back_;
};

}  // namespace hicache::daemon
