// The pages that may be evicted now, ordered by rank: ready, unpinned, without cached children. Every
// operation is O(log n) in the number of such pages (prefix leaves), whatever the size of the page table.
//
// Thread safety: none; the coordinator's own.
#pragma once

#include <cstdint>
#include <vector>

#include "daemon/eviction/policy.hpp"
#include "shm/types.hpp"

namespace hicache::daemon {

class EvictablePages {
 public:
  explicit EvictablePages(std::uint32_t page_capacity) : place_(page_capacity, kAbsent) {}

  // Precondition: the page is not in the set.
  void insert(PageId page, SizeClassId size_class, EvictionRank rank);
  // Nothing happens when the page is not in the set.
  void erase(PageId page, SizeClassId size_class);
  [[nodiscard]] bool contains(PageId page) const { return place_[page.value] != kAbsent; }

  // The first page to go, of any class or of one; none when there is none.
  [[nodiscard]] PageId first() const;
  [[nodiscard]] PageId first(SizeClassId size_class) const;
  [[nodiscard]] std::size_t size() const { return size_; }

 private:
  static constexpr std::uint32_t kAbsent = 0xffffffffu;
  static constexpr std::size_t kArity =
      4;  // a shallow heap: most insertions carry the newest stamp and stay put
  struct Node {
    EvictionRank rank;
    PageId page;
  };
  using Heap = std::vector<Node>;

  void put(Heap& heap, std::size_t at, const Node& node);
  void sift_up(Heap& heap, std::size_t at, const Node& node);
  void sift_down(Heap& heap, std::size_t at, const Node& node);

  std::vector<Heap> heaps_;           // by size class
  std::vector<std::uint32_t> place_;  // by page: index in its class's heap
  std::size_t size_ = 0;
};

}  // namespace hicache::daemon
