// What a prefix tree asks of the tiers below it. The controller implements it on a daemon; tests and
// benchmarks implement it in memory. Every answer is the same on every rank of a group: that keeps the ranks'
// trees equal without a collective.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "hicache/controller/cache_operation.hpp"
#include "shm/status.hpp"
#include "shm/types.hpp"

namespace hicache {

// What a reset clears.
enum class ResetTiers : std::uint8_t { both, device, host };

// Host pages that can't be evicted until they are loaded or let go.
struct HostHold {
  LeaseId lease;
  std::uint64_t sequence = 0;
  std::uint64_t tokens = 0;  // leading tokens that the host really has and that can be loaded
  // Leading tokens that the host has. More than `tokens` for a hybrid model, where a load has to end with a
  // page that carries states.
  std::uint64_t present_tokens = 0;
};

class TreeTier {
 public:
  virtual ~TreeTier() = default;

  // Starts to copy whole pages to the host; the handles that stand for them. `chain` holds the hashes from
  // the first page of the prefix to the last one written. no_space: no handles left, evict_host first.
  virtual Result<std::vector<std::uint64_t>> write(std::span<const std::uint64_t> device_slots,
                                                   std::span<const PrefixHash> chain,
                                                   std::int64_t node_id) = 0;
  // Waits until every write so far has ended, and returns the acks of everything that has.
  virtual Result<std::vector<HiCacheAck>> finish_writes() = 0;

  // Pins what the host has of these pages.
  virtual Result<HostHold> hold(std::span<const std::uint64_t> host_slots) = 0;
  virtual void let_go(const HostHold& hold) = 0;
  // Takes device slots and queues their load from the held pages; the hold goes with it. no_space: too few
  // device slots, the hold stays.
  virtual Result<std::vector<std::uint64_t>> load(const HostHold& hold,
                                                  std::span<const std::uint64_t> host_slots,
                                                  std::int64_t node_id) = 0;

  // Handles for the leading ones of these pages that the pool has now, whoever wrote them; none when it has
  // none. no_space: no handles left, evict_host first.
  virtual Result<std::vector<std::uint64_t>> adopt(std::span<const PrefixHash> pages) = 0;

  // Frees device slots; the host has the only copy from now on when there are host slots.
  virtual Outcome evict_device(std::span<const std::uint64_t> device_slots,
                               std::span<const std::uint64_t> host_slots) = 0;
  // Tokens for which there are host handles left.
  [[nodiscard]] virtual std::uint64_t host_available() const = 0;
  // Gives host handles up. The pool keeps its pages as long as it sees fit.
  virtual Outcome evict_host(std::span<const std::uint64_t> host_slots) = 0;
  // A device copy came back without a load.
  virtual Outcome revive(std::span<const std::uint64_t> host_slots) = 0;
};

}  // namespace hicache
