// A question of an engine: does storage hold these pages of a lease by now? One decision for its group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "daemon/coordinator/waiting_rank.hpp"
#include "shm/status.hpp"
#include "shm/types.hpp"

namespace hicache::daemon {

// It ends when the fate of every page is known: storage holds it, or it was given up. It outlives the lease,
// so that nothing of the group waits for storage.
struct BackupAsk {
  std::uint64_t number = 0;  // finds it again from a deadline
  LeaseId lease;
  GroupSlot group;
  std::uint32_t first = 0;
  std::uint32_t count = 0;
  std::vector<WaitingRank> participants;
  std::uint32_t kept = 0;        // pages that storage holds
  std::uint32_t unresolved = 0;  // pages whose fate is not known yet
  bool ended = false;
  Status end_status = Status::ok;
};

struct BackupAsks {
  // Questions about one lease; more are refused, because a lease keeps their answers for ranks that come
  // late.
  static constexpr std::size_t kMostPerLease = 64;
  // On the average over all pages: beyond it new questions are refused.
  static constexpr std::size_t kMostPerPage = 4;

  std::unordered_map<std::uint64_t, std::shared_ptr<BackupAsk>> open;  // by number
  // Who waits for a page, by key_of. A page is in here only while it is being filled, queued or stored.
  std::unordered_map<std::uint64_t, std::vector<std::shared_ptr<BackupAsk>>> waiting;
  std::size_t waits = 0;  // entries of all these lists

  static constexpr std::uint64_t key_of(PageId page, Generation generation) {
    return std::uint64_t{generation.value} << 32 | page.value;
  }
};

}  // namespace hicache::daemon
