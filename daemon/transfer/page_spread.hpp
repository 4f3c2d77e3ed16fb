// Which of several equal ways each page of a list takes: the ranks of a TP group that write pages they all
// hold, or the GPUs over whose links pages come that all ranks need. Pure code.
#pragma once

#include <algorithm>
#include <cstdint>

namespace hicache::daemon {

// Consecutive pages stay together in stripes, because runs of pages copy faster; every way gets as many
// stripes as every other, so none is the last to end for long.
class PageSpread {
 public:
  // Long enough that a run of this length copies at nearly full speed.
  static constexpr std::uint64_t kStripePages = 64;

  // `first` is the position of the list in its request: lists of one page take turns too.
  // Precondition: ways > 0.
  constexpr PageSpread(std::uint64_t first, std::uint64_t count, std::uint32_t ways)
      : ways_(ways),
        turn_(first % ways),
        stripe_(stripe(count, std::uint64_t{ways} * std::max<std::uint64_t>(
                                                        1, count / (std::uint64_t{ways} * kStripePages)))) {}

  // The way of the page at this index of the list.
  [[nodiscard]] constexpr std::uint32_t way_of(std::uint64_t index) const {
    return static_cast<std::uint32_t>((index / stripe_ + turn_) % ways_);
  }

 private:
  static constexpr std::uint64_t stripe(std::uint64_t count, std::uint64_t stripes) {
    return std::max<std::uint64_t>(1, (count + stripes - 1) / stripes);
  }
  std::uint32_t ways_;
  std::uint64_t turn_;
  std::uint64_t stripe_;
};

}  // namespace hicache::daemon
