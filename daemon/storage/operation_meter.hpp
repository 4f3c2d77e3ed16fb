// How one kind of storage operation goes: counts, latency and bandwidth.
//
// Thread safety: none; the storage tier's own, under its mutex.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

namespace hicache::daemon {

class OperationMeter {
 public:
  void begin(std::uint64_t now_ns) {
    if (running_++ == 0) busy_since_ns_ = now_ns;
  }
  // Precondition: begin was called for it.
  void end(std::uint64_t now_ns, std::uint64_t begun_ns) {
    if (--running_ == 0) busy_ns_ += now_ns - busy_since_ns_;
    const std::uint64_t us = (now_ns - begun_ns) / 1000;
    ++batches_;
    total_us_ += us;
    max_us_ = std::max(max_us_, us);
    ++buckets_[std::min<std::size_t>(std::bit_width(us), buckets_.size() - 1)];
  }
  void add_page(bool good, std::uint64_t bytes) {
    ++pages_;
    if (!good) return;
    ++good_pages_;
    bytes_ += bytes;
  }

  [[nodiscard]] std::uint32_t running() const { return running_; }
  [[nodiscard]] std::uint64_t batches() const { return batches_; }
  [[nodiscard]] std::uint64_t pages() const { return pages_; }
  [[nodiscard]] std::uint64_t good_pages() const { return good_pages_; }
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }
  [[nodiscard]] std::uint64_t mean_us() const { return batches_ == 0 ? 0 : total_us_ / batches_; }
  [[nodiscard]] std::uint64_t max_us() const { return max_us_; }
  // A batch took less than this in 99 of 100 cases; a power of two, so at most twice too much.
  [[nodiscard]] std::uint64_t p99_us() const {
    std::uint64_t seen = 0;
    for (std::size_t i = 0; i < buckets_.size(); ++i) {
      seen += buckets_[i];
      if (seen > 0 && seen * 100 >= batches_ * 99) return std::uint64_t{1} << i;
    }
    return 0;
  }
  // Bytes over the time with at least one batch at the backend, in 10^9 bytes a second.
  [[nodiscard]] double gb_per_second(std::uint64_t now_ns) const {
    const std::uint64_t ns = busy_ns_ + (running_ > 0 ? now_ns - busy_since_ns_ : 0);
    return ns == 0 ? 0.0 : static_cast<double>(bytes_) / static_cast<double>(ns);
  }

 private:
  std::uint32_t running_ = 0;
  std::uint64_t busy_since_ns_ = 0;
  std::uint64_t busy_ns_ = 0;
  std::uint64_t batches_ = 0;
  std::uint64_t pages_ = 0;
  std::uint64_t good_pages_ = 0;
  std::uint64_t bytes_ = 0;
  std::uint64_t total_us_ = 0;
  std::uint64_t max_us_ = 0;
  std::array<std::uint64_t, 40> buckets_{};
};

}  // namespace hicache::daemon
