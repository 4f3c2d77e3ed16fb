// Checksums of shards in the pool: made when a shard's last byte has landed, compared before it is loaded.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>

#include "daemon/config.hpp"
#include "shm/region_layout.hpp"
#include "shm/types.hpp"

namespace hicache::daemon {

// False where this build has no hash function for them (xxHash was not there).
bool checksums_available();

// Thread safety: record and matches may run on any thread, for different shards at the same time. Who writes
// a shard and who reads it is decided by the coordinator: a shard is only read once its page is ready.
class ShardChecksums {
 public:
  // `table` has a word for each 4 KiB line of the pool, as the control region holds it.
  ShardChecksums(const Config::Integrity& config, std::span<A64> table, const std::uint8_t* pool)
      : config_(config), table_(table), pool_(pool) {}

  // A rank has written the shard at `shard`: keeps its checksum, or that it has none under this policy.
  void record(PoolOffset shard, std::uint64_t bytes) const;
  // The shard has come from storage. The same, and with the policy `storage` a checksum too.
  void record_fetched(PoolOffset shard, std::uint64_t bytes) const;
  // The shard is about to go to storage. False when its bytes are not what was written; with the policy
  // `storage` it has a checksum afterwards. What is compared: verify is not off and a checksum is kept.
  [[nodiscard]] bool fit_for_storage(PoolOffset shard, std::uint64_t bytes) const;
  // False when a checksum is kept and the bytes have another one now.
  [[nodiscard]] bool matches(PoolOffset shard, std::uint64_t bytes) const;

  [[nodiscard]] bool recording() const { return config_.checksums != ChecksumPolicy::off; }
  [[nodiscard]] bool verifies_loads() const { return recording() && config_.verify != VerifyPolicy::off; }
  [[nodiscard]] bool verifies_takeover() const { return recording() && config_.verify == VerifyPolicy::full; }

 private:
  [[nodiscard]] std::uint64_t sum(PoolOffset shard, std::uint64_t bytes) const;
  [[nodiscard]] bool sampled(PoolOffset shard) const;
  void keep(PoolOffset shard, std::uint64_t bytes, bool wanted) const;
  [[nodiscard]] A64& place(PoolOffset shard) const { return table_[shard.value / kPoolAlignment]; }

  Config::Integrity config_;
  std::span<A64> table_;
  const std::uint8_t* pool_;
};

}  // namespace hicache::daemon
