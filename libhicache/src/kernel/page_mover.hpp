// What moves pages between a rank's device memory and the pool that it maps: its CPU or its GPU.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "kernel_requests.hpp"
#include "shm/region_layout.hpp"

namespace hicache {

// Whether the pool is still the daemon's that leased the pages. A daemon that takes the region over changes
// the epoch before it gives any page to anybody else: bytes that were read before the epoch was seen
// unchanged are the leased page's.
class PoolGuard {
 public:
  PoolGuard(const RegionHeader& header, std::uint64_t epoch) : header_(&header), epoch_(epoch) {}
  [[nodiscard]] bool ours() const {
    std::atomic_thread_fence(std::memory_order_acquire);  // the page was read before the epoch is
    return header_->instance_epoch.load(std::memory_order_relaxed) == epoch_;
  }

 private:
  const RegionHeader* header_;
  std::uint64_t epoch_;
};

// Used by the worker's thread only.
class HICACHE_LOCAL PageMover {
 public:
  PageMover() = default;
  PageMover(const PageMover&) = delete;
  PageMover& operator=(const PageMover&) = delete;
  virtual ~PageMover() = default;

  // Whether begin() may be called for this direction.
  [[nodiscard]] virtual bool has_room(bool loads) const = 0;
  // Begins a request; next_end() reports it. A load announces each layer as its last byte lands, in order.
  virtual void begin(const KernelWork& work) = 0;
  // One that has ended since: nothing of it touches device or pool any more.
  virtual std::optional<KernelEnd> next_end() = 0;
  // Nothing begins any more: ends what has not begun with closed, and waits for the rest. next_end() reports
  // them.
  virtual void finish() = 0;
  // Requests that have begun and were not reported.
  [[nodiscard]] virtual bool busy() const = 0;
};

}  // namespace hicache
