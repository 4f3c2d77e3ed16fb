// Named places in daemon and client library at which a test build kills its own process
// (tests/crash/crash_matrix_test). In every other build HICACHE_CRASH_POINT is nothing at all.
//
// A process that has HICACHE_CRASH_AT=NAME in its environment ends by SIGKILL when it comes to that point;
// HICACHE_CRASH_AT=NAME:N at the Nth time.
#pragma once

// X(name, where that is)
#define HICACHE_DAEMON_CRASH_POINTS(X)                                          \
  X(region_control_made, "control region made, pool not")                       \
  X(region_header_written, "fresh region with its header, tables not prepared") \
  X(takeover_recovering, "state says recovering, header is the old one")        \
  X(takeover_header_written, "header is the new one, tables are the old ones")  \
  X(takeover_surveyed, "pages chosen, tables not rebuilt")                      \
  X(takeover_rebuilt, "tables rebuilt, not accounted for")                      \
  X(start_published, "region is ready, nobody listens")                         \
  X(attach_channel_made, "channel made, coordinator not asked")                 \
  X(attach_admitted, "client has its slot, not its group")                      \
  X(attach_joined, "client belongs to its group, answer not sent")              \
  X(attach_welcome_sent, "welcome sent, tripwire not watched")                  \
  X(register_mapped, "device buffers mapped, coordinator not told")             \
  X(register_adopted, "coordinator has the buffers, rank does not know")        \
  X(submission_taken, "entry taken from the ring, not executed")                \
  X(reserve_opened, "lease opened without pins")                                \
  X(reserve_pinned, "pages pinned, answer not made")                            \
  X(completion_made, "completion in the ring, client not woken")                \
  X(admit_reserved, "page taken and reserved, not linked to its parent")        \
  X(admit_linked, "page filling, not in the index")                             \
  X(admit_decided, "all pages of a write admitted, no copy started")            \
  X(copy_started, "copy planned, no byte moved")                                \
  X(copy_landed, "last byte landed, coordinator not told")                      \
  X(publish_shard, "shard complete, page not published")                        \
  X(publish_sealed, "page sealed, not ready")                                   \
  X(publish_ready, "page ready, its write not answered")                        \
  X(write_answered, "write answered, its lease still open")                     \
  X(load_posted, "load handed to the transfers")                                \
  X(load_layer_announced, "a layer announced, others to come")                  \
  X(load_ended, "load landed, its lease not told")                              \
  X(release_holder_gone, "rank does not hold the lease any more")               \
  X(release_stamped, "pages have their use stamps, pins are there")             \
  X(release_unpinned, "pages unpinned, lease entry there")                      \
  X(release_closed, "lease closed, group not told")                             \
  X(evict_marked, "page evicting, still in the index")                          \
  X(evict_unindexed, "page out of the index, slot not returned")                \
  X(evict_freed, "slot returned, page word not free")                           \
  X(lose_fenced, "dead client fenced, group whole")                             \
  X(lose_left, "dead client out of its group, leases there")                    \
  X(abort_unindexed, "half-filled page out of the index, still filling")        \
  X(bump_retired, "namespace retired, its pages there")
// In a daemon with storage. Those whose name begins with sglang_ in the format that SGLang reads, the others
// in segments.
#define HICACHE_STORAGE_CRASH_POINTS(X)                                                      \
  X(segments_opened, "segments of the last daemon opened, not read")                         \
  X(segment_made, "segment has its header, not yet its name")                                \
  X(storage_noted, "batch noted, storage not asked")                                         \
  X(backup_marked, "pages are being stored, nothing sent")                                   \
  X(segment_write_started, "records handed to the disk")                                     \
  X(segment_records_written, "records on the disk, not in the index")                        \
  X(segment_record_kept, "record in the index, coordinator not told")                        \
  X(backup_kept, "page stored and not dirty, still marked as being stored")                  \
  X(backup_done, "every page of a backup stored, the backup still there")                    \
  X(prefetch_asked, "storage asked what it has")                                             \
  X(prefetch_admitted, "room taken for pages of storage, none asked for")                    \
  X(prefetch_sent, "pages filling from storage")                                             \
  X(segment_read_landed, "page read into the pool, not compared")                            \
  X(prefetch_landed, "page from storage whole, not published")                               \
  X(prefetch_ended, "prefetch over, nobody told")                                            \
  X(segment_footer_written, "footer of a full segment written, perhaps not on the disk")     \
  X(segment_evicted, "pages of the oldest segment forgotten, their records there")           \
  X(segment_begun_again, "old segment has a new header, not used yet")                       \
  X(segment_hot_moved, "page that was in use written once more, index leads to the old one") \
  X(sglang_written, "file written under its temporary name")                                 \
  X(sglang_renamed, "file has its name, coordinator not told")
// In a daemon whose storage is a Redis server. A point of a page is passed on the way to or from the server.
#define HICACHE_REDIS_CRASH_POINTS(X)                                                    \
  X(redis_greeted, "server has greeted, no page asked for")                              \
  X(redis_probe_answered, "server lacks the page of a backup, its value not sent")       \
  X(redis_write_sent, "value of a page handed to the socket")                            \
  X(redis_write_answered, "server has the page, coordinator not told")                   \
  X(redis_read_asked, "page asked for, its buffers wait")                                \
  X(redis_read_landing, "bytes of a page in the pool, their record not believed yet")    \
  X(redis_read_whole, "page whole in the pool, coordinator not told")                    \
  X(redis_corrupt_found, "value is no true record, page not deleted at the server")      \
  X(redis_corrupt_deleted, "page that was no true record deleted, coordinator not told") \
  X(redis_clear_scanned, "keys to forget found, none deleted")                           \
  X(redis_clear_deleted, "first key of a clear deleted")
// In a daemon with a rank in io_backend kernel: the rank moves the bytes.
#define HICACHE_KERNEL_DAEMON_CRASH_POINTS(X)                                       \
  X(kernel_posted, "request in the rank's block, rank not woken")                   \
  X(kernel_woken, "request posted, rank woken")                                     \
  X(kernel_end_believed, "end of a request read and checked, coordinator not told") \
  X(kernel_withdrawn, "request taken back from a rank that had not taken it")       \
  X(kernel_gone, "rank's process has ended, what it had taken still leased")        \
  X(kernel_mapper_gone, "process that an earlier daemon let map the pool has ended, its pages still held")
#define HICACHE_CLIENT_CRASH_POINTS(X)                            \
  X(connect_done, "connected, no Hello sent")                     \
  X(hello_sent, "Hello sent, welcome not read")                   \
  X(welcome_read, "welcome read, nothing mapped")                 \
  X(welcome_mapped, "region and channel mapped")                  \
  X(session_made, "session made, its thread may not run yet")     \
  X(buffers_sent, "device buffers sent, answer not read")         \
  X(buffers_registered, "device buffers registered")              \
  X(post_listed, "lists in the arena, entry not published")       \
  X(post_pushed, "entry published, daemon not kicked")            \
  X(post_kicked, "entry published, daemon kicked")                \
  X(wait_flagged, "says that it sleeps, does not sleep yet")      \
  X(event_taken, "completion taken from the ring, not looked at") \
  X(event_delivered, "result handed out")                         \
  X(fence_raised, "write fence raised")                           \
  X(goodbye_sent, "goodbye sent, connection open")
// In a rank in io_backend kernel, beside the others.
#define HICACHE_KERNEL_CLIENT_CRASH_POINTS(X)                         \
  X(pool_mapped, "pool and kernel block mapped, nobody serves them")  \
  X(kernel_started, "thread that serves requests started")            \
  X(kernel_parked, "says that it sleeps until a request comes")       \
  X(kernel_taken, "request taken, not read")                          \
  X(kernel_layer_moved, "a layer of the pages moved, others to come") \
  X(kernel_layer_announced, "a layer announced, others to come")      \
  X(kernel_moved, "every byte moved, end not reported")               \
  X(kernel_reported, "end reported, daemon not rung")                 \
  X(kernel_rung, "end reported, daemon rung")                         \
  X(kernel_ending, "session ends, thread that serves requests about to end")

#ifdef HICACHE_CRASH_POINTS
namespace hicache {
// Ends the process when `name` is the point of HICACHE_CRASH_AT. From any thread.
void crash_point(const char* name);
}  // namespace hicache
#define HICACHE_CRASH_POINT(name) ::hicache::crash_point(#name)
#else
#define HICACHE_CRASH_POINT(name) static_cast<void>(0)
#endif
