// Counters of the daemon, by name. They only grow, except the gauges, which end in a noun of what there is
// now.
#pragma once

#include <cstdint>
#include <string_view>

namespace hicache {

// X(identifier, "what it counts")
#define HICACHE_COUNTERS(X)                                                                             \
  X(operations, "ring entries executed")                                                                \
  X(operations_failed, "ring entries that ended with an error")                                         \
  X(reserves, "reserve decisions, one per group")                                                       \
  X(pages_requested, "pages asked for in reserve decisions")                                            \
  X(hits, "pages found present at reserve")                                                             \
  X(full_hits, "reserve decisions whose pages were all present")                                        \
  X(written, "pages published")                                                                         \
  X(dropped, "pages asked to be written that found no room")                                            \
  X(aborted, "pages whose fill failed")                                                                 \
  X(skipped_ready, "pages asked to be written that were ready already")                                 \
  X(skipped_filling, "pages asked to be written that another was filling")                              \
  X(evicted, "pages evicted")                                                                           \
  X(evicted_demand, "pages evicted because a page or slot was needed at once")                          \
  X(evicted_watermark, "pages evicted in the background")                                               \
  X(evicted_request, "pages evicted by hicache-ctl or a namespace bump")                                \
  X(bytes_written, "bytes copied device to host for pages that were published")                         \
  X(bytes_loaded, "bytes copied host to device")                                                        \
  X(copies_failed, "transfers that ended with an error")                                                \
  X(timed_out, "operations ended by their deadline")                                                    \
  X(divergences, "operations that differed between the ranks of a group")                               \
  X(poisoned, "sequences poisoned by a divergence")                                                     \
  X(peer_lost, "operations ended by the loss of a peer")                                                \
  X(bad_entries, "ring entries refused before execution")                                               \
  X(fenced_clients, "clients cut off for breaking the ring protocol")                                   \
  X(lost_clients, "clients that died or left without detaching")                                        \
  X(attaches, "clients attached")                                                                       \
  X(attach_refused, "attach attempts refused")                                                          \
  X(double_release, "second releases refused")                                                          \
  X(stale_generation, "messages refused for an old generation")                                         \
  X(completion_ring_full, "turns in which a client was not served because its completions were unread") \
  X(quota_leases, "reserves refused because the group has limits.leases_per_group open leases")         \
  X(quota_pages, "operations that got fewer pages because other groups are guaranteed the room")        \
  X(quota_operations, "operations refused because of limits.operations_per_client")                     \
  X(quota_arena, "operations refused because of limits.arena_in_flight_bytes")                          \
  X(read_only_refused, "operations and commands refused because the user may only read")                \
  X(connections_refused, "connections refused by a limit or the allow-list of the socket")              \
  X(late_wakes, "time-outs that found work published more than 1 ms before")                            \
  X(parks, "times the coordinator went to sleep")                                                       \
  X(takeovers, "times a daemon took this region over")                                                  \
  X(pages_kept, "ready pages that takeovers kept")                                                      \
  X(pages_not_kept, "ready pages that takeovers dropped because their entry was inconsistent")          \
  X(shards_verified, "shards whose checksum was compared")                                              \
  X(checksum_mismatches, "shards whose checksum was wrong")                                             \
  X(quarantined, "pages quarantined for a wrong checksum")                                              \
  X(evicted_dirty, "pages evicted that no storage was known to hold")                                   \
  X(prefetches, "prefetch decisions, one per group")                                                    \
  X(prefetch_short, "prefetches not begun because they were below the threshold")                       \
  X(prefetch_limited, "prefetches not begun because too much was in flight")                            \
  X(prefetch_no_storage, "prefetches not begun because storage was detached or suspended")              \
  X(prefetch_revoked, "prefetches given up because storage had fewer pages than the threshold")         \
  X(prefetch_cut, "prefetches ended before all their pages had come")                                   \
  X(storage_queried, "pages asked for in hit queries")                                                  \
  X(storage_hits, "leading pages that storage had, of those asked for")                                 \
  X(prefetched, "pages published from storage")                                                         \
  X(prefetch_shared, "pages that a prefetch waited for because another was filling them")               \
  X(prefetch_failed, "pages whose read from storage failed")                                            \
  X(storage_corrupt, "pages that storage found damaged when it read them")                              \
  X(bytes_prefetched, "bytes read from storage for pages that were published")                          \
  X(backups, "backup operations begun")                                                                 \
  X(backups_ended, "backup operations that have ended, each once")                                      \
  X(backed_up, "pages that storage has kept")                                                           \
  X(bytes_backed_up, "bytes that storage has kept")                                                     \
  X(backup_full, "pages not backed up because the queue was full")                                      \
  X(backup_no_storage, "pages not backed up because storage was detached or suspended")                 \
  X(backup_gone, "pages not backed up because they were evicted or condemned first")                    \
  X(backup_no_space, "pages not backed up because storage had no room")                                 \
  X(backup_timed_out, "pages not known to be backed up because storage did not answer in time")         \
  X(backup_failed, "pages not backed up because storage failed, or a page before them was lost")        \
  X(backup_asks, "backups that engines asked about, one decision per group")                            \
  X(storing_refusals, "pages that got no place while others could not go because storage read them")    \
  X(refused_transitions, "wrong transitions of host page handles that engines refused")                 \
  X(storage_reads, "batches of pages that storage has read")                                            \
  X(storage_read_us, "microseconds that these batches took, added up")                                  \
  X(storage_writes, "batches of pages that storage has written")                                        \
  X(storage_write_us, "microseconds that these batches took, added up")                                 \
  X(storage_late, "storage batches that did not end by their deadline")                                 \
  X(storage_suspensions, "times the circuit breaker suspended storage")                                 \
  X(resident_pages, "gauge: pages that are not free")                                                   \
  X(ready_pages, "gauge: pages visible to lookups")                                                     \
  X(pinned_pages, "gauge: pins held by leases")                                                         \
  X(live_leases, "gauge: leases in use")                                                                \
  X(used_pool_bytes, "gauge: bytes of slots in use")                                                    \
  X(usable_pool_bytes, "gauge: bytes at the pool's start for new pages; the rest is not pinned yet")    \
  X(assigned_segments, "gauge: segments given to a size class")                                         \
  X(backup_queue_pages, "gauge: pages that wait for their backup")                                      \
  X(storing_pages, "gauge: pages whose bytes storage is reading for a backup")                          \
  X(prefetching_pages, "gauge: pages that prefetches hold room for")                                    \
  X(storage_state, "gauge: 0 no storage, 1 attached, 2 suspended")                                      \
  X(held_pages, "gauge: pages leased under an earlier daemon to processes that still map the pool")     \
  X(attached_clients, "gauge: clients attached")

enum class Counter : std::uint32_t {
#define HICACHE_X(id, text) id,
  HICACHE_COUNTERS(HICACHE_X)
#undef HICACHE_X
      count_
};
constexpr std::uint32_t kCounterCount = static_cast<std::uint32_t>(Counter::count_);

constexpr std::string_view counter_name(Counter c) {
  constexpr std::string_view names[] = {
#define HICACHE_X(id, text) #id,
      HICACHE_COUNTERS(HICACHE_X)
#undef HICACHE_X
  };
  return names[static_cast<std::uint32_t>(c)];
}

constexpr std::string_view counter_help(Counter c) {
  constexpr std::string_view texts[] = {
#define HICACHE_X(id, text) text,
      HICACHE_COUNTERS(HICACHE_X)
#undef HICACHE_X
  };
  return texts[static_cast<std::uint32_t>(c)];
}

}  // namespace hicache
