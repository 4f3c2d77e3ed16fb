// Hands out pieces of a channel's arena. All bookkeeping is private: nothing in shared memory is ever
// believed.
//
// Not thread-safe; the session's mutex guards it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace hicache {

// First fit over a sorted list of free ranges that grow together again when their pieces come back.
class Arena {
 public:
  static constexpr std::uint32_t kAlignment = 8;

  Arena() = default;
  // `bytes` is rounded down to the alignment.
  explicit Arena(std::uint64_t bytes);

  // Offset of a piece of at least `bytes` (> 0), or nothing when no free range is long enough now.
  std::optional<std::uint32_t> allocate(std::uint64_t bytes);
  // Takes a piece back, with the byte count it was asked for. False, and nothing done, when any of it is free
  // already or outside the arena.
  bool release(std::uint32_t offset, std::uint64_t bytes);

  [[nodiscard]] std::uint64_t size() const { return size_; }
  [[nodiscard]] std::uint64_t free_bytes() const { return free_bytes_; }
  [[nodiscard]] std::size_t free_ranges() const { return free_.size(); }

 private:
  struct Range {
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
  };
  std::vector<Range> free_;  // by offset, never touching each other
  std::uint64_t size_ = 0;
  std::uint64_t free_bytes_ = 0;
};

}  // namespace hicache
