// When operations end for lack of time. An operation that ends earlier leaves its entry behind: taking it out
// would cost a search. The entries left behind are thrown out together before they outnumber the others.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace hicache::daemon {

struct Deadline {
  std::uint64_t at_ns = 0;
  std::uint64_t transfer = 0;      // a load's transfer, or 0
  std::uint64_t write_number = 0;  // a group write, or 0
  std::uint64_t prefetch = 0;      // a prefetch, or 0
  std::uint64_t backup = 0;        // a question about a backup, or 0
  friend bool operator>(const Deadline& a, const Deadline& b) { return a.at_ns > b.at_ns; }
};

// Thread safety: none; the coordinator's own.
class DeadlineQueue {
 public:
  static constexpr std::size_t kSpare = 1024;  // entries that may stay behind whatever is open

  [[nodiscard]] bool empty() const { return heap_.empty(); }
  [[nodiscard]] std::size_t size() const { return heap_.size(); }
  // The earliest one. Precondition: not empty.
  [[nodiscard]] const Deadline& top() const { return heap_.front(); }
  void pop() {
    std::pop_heap(heap_.begin(), heap_.end(), std::greater<>{});
    heap_.pop_back();
  }
  // `open` operations have an entry, and `is_open` tells of each entry whether it is one of theirs.
  template <class IsOpen>
  void push(const Deadline& deadline, std::size_t open, IsOpen is_open) {
    if (heap_.size() >= kSpare + 2 * open) {
      std::erase_if(heap_, [&](const Deadline& d) { return !is_open(d); });
      std::make_heap(heap_.begin(), heap_.end(), std::greater<>{});
    }
    heap_.push_back(deadline);
    std::push_heap(heap_.begin(), heap_.end(), std::greater<>{});
  }

 private:
  std::vector<Deadline> heap_;
};

}  // namespace hicache::daemon
