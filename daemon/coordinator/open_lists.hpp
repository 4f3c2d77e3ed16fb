// The lists in a client's arena that its open operations name, in bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace hicache::daemon {

// A list counts as often as it is named: the arena's own size does not bound what a client makes the daemon
// copy and keep by naming the same bytes again and again. Few operations are open at a time, and they end
// about in the order in which they began.
//
// Thread safety: none; the coordinator's own.
class OpenLists {
 public:
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }

  // Precondition: `operation` has no list yet.
  void add(std::uint64_t operation, std::uint64_t bytes) {
    lists_.push_back({operation, bytes});
    bytes_ += bytes;
  }
  // The operation has ended. One without a list is ignored.
  void drop(std::uint64_t operation) {
    const auto found = std::find_if(lists_.begin(), lists_.end(),
                                    [operation](const List& list) { return list.operation == operation; });
    if (found == lists_.end()) return;
    bytes_ -= found->bytes;
    lists_.erase(found);
  }

 private:
  struct List {
    std::uint64_t operation;  // its sequence number, the daemon's own
    std::uint64_t bytes;
  };
  std::vector<List> lists_;
  std::uint64_t bytes_ = 0;
};

}  // namespace hicache::daemon
