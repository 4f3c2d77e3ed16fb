// Keeps prefixes in the daemon's pool for a time, whatever else wants its place there.
//
// A pin of the prefix tree keeps an engine's handles and device copies; what it stands for in the pool is a
// cached page like others. This class holds the pages themselves: each pin is a lease that is given back when
// its time has come. The leases belong to the group's scheduler, which has sequences of its own, so that they
// hold up no acks of the ranks. They end with the session: nothing stays pinned for an engine that is gone.
//
// Thread safety: none; one thread. Blocking: pin waits for the daemon's answer, at most timeout_ms. Errors:
// values.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "hicache/client.hpp"
#include "hicache/export.h"

namespace hicache {

class HICACHE_EXPORT PoolPins {
 public:
  // `session` is attached as the engine's scheduler (Role::scheduler), serves nothing else that reserves, and
  // outlives the object. `max_pages`: the share of the pool that pins may hold at most.
  PoolPins(Session& session, std::uint64_t max_pages, std::uint32_t timeout_ms = 10'000);
  // Gives everything back.
  ~PoolPins();
  PoolPins(const PoolPins&) = delete;
  PoolPins& operator=(const PoolPins&) = delete;

  // Keeps the leading pages of this prefix that the pool has now until `until`, a clock of the caller's; how
  // many they are. not_found when there are none, no_space beyond max_pages. Pinned again, a prefix keeps the
  // later time, and pages that have come since.
  Result<std::uint32_t> pin(std::span<const PrefixHash> hashes, std::uint64_t until);
  // Gives back every pin whose time has come.
  void expire(std::uint64_t now);

  [[nodiscard]] std::uint64_t pages() const { return pages_; }
  [[nodiscard]] std::size_t pins() const { return pins_.size(); }

 private:
  struct Pin {
    PrefixHash last;  // of the prefix that was asked for
    LeaseId lease;
    std::uint32_t pages = 0;
    std::uint64_t until = 0;
  };
  Result<OperationResult> reserve(std::span<const PrefixHash> hashes);
  void give_back(LeaseId lease);

  Session& session_;
  std::uint64_t max_pages_;
  std::uint32_t timeout_ms_;
  std::uint64_t next_sequence_ = 1;
  std::uint64_t pages_ = 0;
  std::vector<Pin> pins_;
};

}  // namespace hicache
