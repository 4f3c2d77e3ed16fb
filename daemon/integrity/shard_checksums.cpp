#include "daemon/integrity/shard_checksums.hpp"

#ifdef HICACHE_HAVE_XXHASH
#define XXH_INLINE_ALL
#include <xxhash.h>
#endif

namespace hicache::daemon {
namespace {

constexpr std::uint64_t kSampleOneIn = 16;  // pages with a checksum under `sampled`, chosen by their place

std::uint64_t hash_bytes([[maybe_unused]] const std::uint8_t* data, [[maybe_unused]] std::uint64_t bytes) {
#ifdef HICACHE_HAVE_XXHASH
  return XXH3_64bits(data, bytes);
#else
  return 0;
#endif
}

}  // namespace

bool checksums_available() {
#ifdef HICACHE_HAVE_XXHASH
  return true;
#else
  return false;
#endif
}

std::uint64_t ShardChecksums::sum(PoolOffset shard, std::uint64_t bytes) const {
  const std::uint64_t hash = hash_bytes(pool_ + shard.value, bytes);
  return hash == 0 ? 1 : hash;  // 0 means "none"
}

bool ShardChecksums::sampled(PoolOffset shard) const {
  switch (config_.checksums) {
    case ChecksumPolicy::off:
    case ChecksumPolicy::storage:
      return false;
    case ChecksumPolicy::sampled:
      return shard.value / kPoolAlignment % kSampleOneIn == 0;
    case ChecksumPolicy::always:
      return true;
  }
  return false;
}

void ShardChecksums::keep(PoolOffset shard, std::uint64_t bytes, bool wanted) const {
  if (!recording()) return;
  // Relaxed: whoever compares it has learnt of the page through the coordinator.
  place(shard).store(wanted ? sum(shard, bytes) : 0, std::memory_order_relaxed);
}

void ShardChecksums::record(PoolOffset shard, std::uint64_t bytes) const {
  keep(shard, bytes, sampled(shard));
}

void ShardChecksums::record_fetched(PoolOffset shard, std::uint64_t bytes) const {
  keep(shard, bytes, sampled(shard) || config_.checksums == ChecksumPolicy::storage);
}

bool ShardChecksums::fit_for_storage(PoolOffset shard, std::uint64_t bytes) const {
  if (!recording()) return true;
  if (place(shard).load(std::memory_order_relaxed) != 0) return !verifies_loads() || matches(shard, bytes);
  if (config_.checksums == ChecksumPolicy::storage) keep(shard, bytes, true);
  return true;
}

bool ShardChecksums::matches(PoolOffset shard, std::uint64_t bytes) const {
  const std::uint64_t kept = place(shard).load(std::memory_order_relaxed);
  return kept == 0 || kept == sum(shard, bytes);
}

}  // namespace hicache::daemon
