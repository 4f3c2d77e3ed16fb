// A transfer that a rank does itself: its checks before a page is leased, and what is due at its end.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "daemon/integrity/shard_checksums.hpp"
#include "daemon/transfer/transfers.hpp"
#include "shm/kernel_layout.hpp"

namespace hicache::daemon {

// Owned by the thread of KernelTransfers.
struct KernelJob {
  explicit KernelJob(Transfer t) : transfer(std::move(t)) {}

  [[nodiscard]] bool loads() const { return transfer.direction == Direction::load; }
  // Refuses what the rank could have got wrong. Sets verdict.
  void admit(std::uint64_t pool_bytes);
  // A write may be posted when its fence word has reached the value; a load always may.
  [[nodiscard]] bool may_start() const;
  // Compares checksums of what a load would read. Sets verdict.
  void verify(const ShardChecksums* checksums);
  [[nodiscard]] bool expired(std::uint64_t now_ns) const {
    return transfer.deadline_ns != 0 && now_ns >= transfer.deadline_ns;
  }
  // What a rank that has moved all of it has moved.
  [[nodiscard]] std::uint64_t whole_bytes() const;
  // Writes the request into its slot; `number` and `slot` are set.
  void describe(KernelSlot& slot_of_block, std::uint32_t block_quota) const;
  // Releases the waiters of a failed load, records the checksums of what was written, lets go of the rank's
  // memory, and returns what the sink is to be told.
  TransferDone finish(const ShardChecksums* checksums);

  Transfer transfer;
  Status verdict = Status::ok;
  std::uint64_t arrived_ns = 0;
  std::uint64_t bytes = 0;
  std::uint64_t number = 0;  // of its request, once it is posted
  std::uint32_t verified = 0;
  std::vector<PoolOffset> corrupt;
};

using KernelJobPtr = std::unique_ptr<KernelJob>;

}  // namespace hicache::daemon
