// A rank's side of its kernel block: takes the daemon's requests, oldest first, refuses what can't be, and
// reports ends. Knows nothing of devices.
#pragma once

#include <cstdint>
#include <vector>

#include "hicache/export.h"
#include "shm/kernel_layout.hpp"
#include "shm/status.hpp"

namespace hicache {

// A page to move.
struct KernelCopy {
  PoolOffset host;    // of the rank's shard of the page
  DevicePage device;  // below the geometry's pages
  DevicePage state;   // none: its states are not copied
};

// What the daemon asked for; a copy, checked.
struct KernelWork {
  std::uint32_t slot = 0;
  std::uint64_t number = 0;
  bool loads = false;
  std::uint32_t block_quota = 1;
  std::uint32_t fence = kNone32;  // load: producer slot of the layer fences, or none
  std::uint32_t fence_value = 0;
  std::vector<KernelCopy> pages;
};

// How one ended.
struct KernelEnd {
  std::uint32_t slot = 0;
  std::uint64_t number = 0;
  Status status = Status::ok;
  std::uint64_t bytes = 0;
};

// What requests are checked against.
struct KernelLimits {
  std::uint64_t pool_bytes = 0;
  std::uint64_t shard_bytes = 0;
  std::uint32_t device_pages = 0;
  std::uint32_t states = 0;
};

// Used by one thread, except wake.
class HICACHE_LOCAL KernelRequests {
 public:
  // `news` is the daemon's eventfd; it stays the caller's.
  KernelRequests(KernelBlock& block, int news, const KernelLimits& limits)
      : block_(block), news_(news), limits_(limits) {}

  // The oldest posted request to load or to write, taken: end() must follow. Requests that name what is not
  // there are refused on the way. False when there is none.
  bool take(bool loads, KernelWork& work);
  // Whether there may be one.
  [[nodiscard]] bool posted() const;
  // Reports an end. Everything that the request wrote is in place.
  void end(const KernelEnd& end);
  // Sleeps until a request is posted, or wake() is called, or the time is over.
  void park(std::uint64_t timeout_ns);
  // Ends a sleep, from any thread.
  void wake();

 private:
  [[nodiscard]] bool read(const KernelSlot& slot, KernelWork& work) const;

  KernelBlock& block_;
  const int news_;
  const KernelLimits limits_;
};

}  // namespace hicache
