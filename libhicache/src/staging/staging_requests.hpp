// A rank's side of its staging block: takes the daemon's requests, oldest first, and refuses what can't be.
// Knows nothing of CUDA.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "hicache/export.h"
#include "shm/namespace_spec.hpp"
#include "shm/staging_layout.hpp"

namespace hicache {

// What the daemon asked for; a copy, checked.
struct StagingWork {
  std::uint32_t slot = 0;
  std::uint64_t number = 0;
  std::uint32_t first_layer = 0;
  std::uint32_t end_layer = 0;
  std::uint32_t blocks = 1;
  std::uint32_t pages = 0;
  std::array<std::uint32_t, kStagingChunkPages> page{};
};

// What requests are checked against.
struct StagingLimits {
  std::uint32_t layers = 0;
  std::uint64_t layer_bytes = 0;  // of a page's layer, all kinds
  std::uint32_t device_pages = 0;
  std::uint64_t slot_bytes = 0;
};

// Used by one thread.
class HICACHE_LOCAL StagingRequests {
 public:
  StagingRequests(StagingBlock& block, const StagingLimits& limits) : block_(block), limits_(limits) {}

  // The oldest posted request to unpack (loads) or to pack, taken: an answer must follow. Requests that name
  // what is not there are refused on the way. False when there is none.
  bool take(bool loads, StagingWork& work);
  // Whether there may be one.
  [[nodiscard]] bool posted() const;
  // Ends a request that was not run. One that was run is ended by its stream, in done_word.
  void refuse(const StagingWork& work);
  // The request has been answered, by whomever; later requests of its slot may have been, too.
  [[nodiscard]] bool ended(std::uint32_t slot, std::uint64_t number) const {
    return timeline_reached(block_.slots[slot].done.load(std::memory_order_acquire),
                            static_cast<std::uint32_t>(number));
  }
  // The word that a stream sets to the low bits of the request's number behind its kernel.
  [[nodiscard]] A32& done_word(std::uint32_t slot) { return block_.slots[slot].done; }
  // Sleeps until a request is posted, or the daemon or wake() ends it, or the time is over: then false.
  bool park(std::uint64_t timeout_ns);
  // Ends a sleep, from any thread.
  void wake();

 private:
  [[nodiscard]] bool sound(const StagingWork& work) const;

  StagingBlock& block_;
  const StagingLimits limits_;
};

}  // namespace hicache
