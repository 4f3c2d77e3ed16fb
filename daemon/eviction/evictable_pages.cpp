#include "daemon/eviction/evictable_pages.hpp"

#include <algorithm>
#include <cassert>

namespace hicache::daemon {

void EvictablePages::put(Heap& heap, std::size_t at, const Node& node) {
  heap[at] = node;
  place_[node.page.value] = static_cast<std::uint32_t>(at);
}

void EvictablePages::sift_up(Heap& heap, std::size_t at, const Node& node) {
  while (at > 0) {
    const std::size_t parent = (at - 1) / kArity;
    if (heap[parent].rank <= node.rank) break;
    put(heap, at, heap[parent]);
    at = parent;
  }
  put(heap, at, node);
}

void EvictablePages::sift_down(Heap& heap, std::size_t at, const Node& node) {
  for (;;) {
    const std::size_t first = at * kArity + 1;
    if (first >= heap.size()) break;
    const std::size_t last = std::min(first + kArity, heap.size());
    std::size_t best = first;
    for (std::size_t child = first + 1; child < last; ++child) {
      if (heap[child].rank < heap[best].rank) best = child;
    }
    if (node.rank <= heap[best].rank) break;
    put(heap, at, heap[best]);
    at = best;
  }
  put(heap, at, node);
}

void EvictablePages::insert(PageId page, SizeClassId size_class, EvictionRank rank) {
  assert(!contains(page));
  if (heaps_.size() <= size_class.value) heaps_.resize(size_class.value + 1);
  Heap& heap = heaps_[size_class.value];
  heap.emplace_back();
  sift_up(heap, heap.size() - 1, Node{rank, page});
  ++size_;
}

void EvictablePages::erase(PageId page, SizeClassId size_class) {
  const std::uint32_t at = place_[page.value];
  if (at == kAbsent) return;
  Heap& heap = heaps_[size_class.value];
  assert(at < heap.size() && heap[at].page == page);
  place_[page.value] = kAbsent;
  --size_;
  const Node moved = heap.back();
  heap.pop_back();
  if (at == heap.size()) return;
  if (at > 0 && moved.rank < heap[(at - 1) / kArity].rank) {
    sift_up(heap, at, moved);
  } else {
    sift_down(heap, at, moved);
  }
}

PageId EvictablePages::first(SizeClassId size_class) const {
  if (size_class.value >= heaps_.size() || heaps_[size_class.value].empty()) return PageId::none();
  return heaps_[size_class.value].front().page;
}

PageId EvictablePages::first() const {
  const Node* best = nullptr;
  for (const Heap& heap : heaps_) {
    if (!heap.empty() && (best == nullptr || heap.front().rank < best->rank)) best = &heap.front();
  }
  return best == nullptr ? PageId::none() : best->page;
}

}  // namespace hicache::daemon
