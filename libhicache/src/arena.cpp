#include "arena.hpp"

#include <algorithm>

#include "shm/types.hpp"

namespace hicache {

Arena::Arena(std::uint64_t bytes) : size_(bytes / kAlignment * kAlignment), free_bytes_(size_) {
  free_.reserve(64);
  if (size_ > 0) free_.push_back({0, size_});
}

std::optional<std::uint32_t> Arena::allocate(std::uint64_t bytes) {
  if (bytes == 0 || bytes > free_bytes_) return std::nullopt;
  const std::uint64_t need = align_up(bytes, kAlignment);
  const auto range =
      std::find_if(free_.begin(), free_.end(), [&](const Range& r) { return r.bytes >= need; });
  if (range == free_.end()) return std::nullopt;
  const auto offset = static_cast<std::uint32_t>(range->offset);
  range->offset += need;
  range->bytes -= need;
  if (range->bytes == 0) free_.erase(range);
  free_bytes_ -= need;
  return offset;
}

bool Arena::release(std::uint32_t offset, std::uint64_t bytes) {
  const std::uint64_t start = offset;
  if (bytes == 0 || bytes > size_ || start % kAlignment != 0) return false;
  const std::uint64_t end = start + align_up(bytes, kAlignment);
  if (end > size_) return false;
  const auto next = std::lower_bound(free_.begin(), free_.end(), start,
                                     [](const Range& r, std::uint64_t at) { return r.offset < at; });
  if (next != free_.end() && next->offset < end) return false;
  const bool joins_next = next != free_.end() && next->offset == end;
  if (next != free_.begin()) {
    const auto previous = next - 1;
    const std::uint64_t previous_end = previous->offset + previous->bytes;
    if (previous_end > start) return false;
    if (previous_end == start) {
      previous->bytes += end - start;
      if (joins_next) {
        previous->bytes += next->bytes;
        free_.erase(next);
      }
      free_bytes_ += end - start;
      return true;
    }
  }
  if (joins_next) {
    next->offset = start;
    next->bytes += end - start;
  } else {
    free_.insert(next, {start, end - start});
  }
  free_bytes_ += end - start;
  return true;
}

}  // namespace hicache
