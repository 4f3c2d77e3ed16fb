// Latencies in buckets of less than 0.8 % width, without allocation, so that it can lie in memory shared by
// processes. Not thread-safe: one process records; another may read after the first has ended.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

namespace hicache::bench {

class LatencyHistogram {
 public:
  void record(std::uint64_t ns) {
    ++counts_[bucket_of(ns)];
    ++count_;
    sum_ += ns;
    max_ = std::max(max_, ns);
  }
  void merge(const LatencyHistogram& other) {
    for (std::size_t i = 0; i < counts_.size(); ++i) counts_[i] += other.counts_[i];
    count_ += other.count_;
    sum_ += other.sum_;
    max_ = std::max(max_, other.max_);
  }

  [[nodiscard]] std::uint64_t count() const { return count_; }
  [[nodiscard]] std::uint64_t max() const { return max_; }
  [[nodiscard]] double mean() const {
    return count_ == 0 ? 0 : static_cast<double>(sum_) / static_cast<double>(count_);
  }
  // The latency that a share `quantile` (0 to 1) of the samples does not pass; 0 without samples.
  [[nodiscard]] double quantile(double quantile) const {
    if (count_ == 0) return 0;
    const auto wanted =
        std::max<std::uint64_t>(1, static_cast<std::uint64_t>(quantile * static_cast<double>(count_)));
    std::uint64_t seen = 0;
    for (std::size_t i = 0; i < counts_.size(); ++i) {
      seen += counts_[i];
      if (seen >= wanted) return std::min(middle_of(i), static_cast<double>(max_));
    }
    return static_cast<double>(max_);
  }

 private:
  static constexpr unsigned kSubBits = 7;  // 128 buckets for each power of two
  static constexpr std::uint64_t kSub = 1u << kSubBits;
  static constexpr unsigned kOctaves = 36;  // up to 2^42 ns, more than an hour

  static std::size_t bucket_of(std::uint64_t ns) {
    if (ns < kSub) return ns;
    const unsigned shift = static_cast<unsigned>(std::bit_width(ns)) - 1 - kSubBits;
    if (shift >= kOctaves - 1) return kSub * kOctaves - 1;
    return kSub * (shift + 1) + ((ns >> shift) - kSub);
  }
  static double middle_of(std::size_t bucket) {
    if (bucket < kSub) return static_cast<double>(bucket);
    const auto shift = bucket / kSub - 1;
    const auto low = (bucket % kSub + kSub) << shift;
    return static_cast<double>(low) + static_cast<double>((std::uint64_t{1} << shift) - 1) / 2;
  }

  std::array<std::uint64_t, kSub * kOctaves> counts_{};
  std::uint64_t count_ = 0;
  std::uint64_t sum_ = 0;
  std::uint64_t max_ = 0;
};

}  // namespace hicache::bench
