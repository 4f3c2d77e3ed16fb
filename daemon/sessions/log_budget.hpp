// Bounds what a flood of bad clients can write into the log.
#pragma once

#include <cstdint>

#include "shm/clock.hpp"

namespace hicache::daemon {

// At most kLines a second. Not thread-safe.
class LogBudget {
 public:
  // Whether one more line may be written now.
  bool take() {
    const std::uint64_t second = monotonic_ns() / 1'000'000'000;
    if (second != second_) {
      second_ = second;
      used_ = 0;
    }
    return used_++ < kLines;
  }

 private:
  static constexpr std::uint32_t kLines = 20;
  std::uint64_t second_ = 0;
  std::uint32_t used_ = 0;
};

}  // namespace hicache::daemon
