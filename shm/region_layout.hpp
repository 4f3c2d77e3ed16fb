// Everything that lies in the control region, and nothing else. docs/shared-memory.md explains it with a
// picture.
//
// Rules: fixed-width fields, explicit padding, no pointers, zero means "nothing". The daemon is the only
// writer of the whole region. All fields are atomics so that readers in other processes have no data race;
// where a field is loaded or stored without a comment its order is relaxed and its consistency comes from a
// generation, a bucket version or the commit sequence named beside the struct.
//
// Changing anything here changes the layout fingerprint; a daemon or tool built with another one refuses the
// region and says so. Bump kLayoutMajor when old content cannot be read any more, kLayoutMinor when it still
// can.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "shm/host_page_state.hpp"
#include "shm/types.hpp"

namespace hicache {

constexpr std::uint64_t kRegionMagic = 0x3145484341434948ull;  // "HICACHE1"
constexpr std::uint32_t kLayoutMajor = 1;
constexpr std::uint32_t kLayoutMinor = 0;

using A8 = std::atomic<std::uint8_t>;
using A16 = std::atomic<std::uint16_t>;
using A32 = std::atomic<std::uint32_t>;
using A64 = std::atomic<std::uint64_t>;
static_assert(A32::is_always_lock_free && A64::is_always_lock_free);
static_assert(sizeof(A8) == 1 && sizeof(A16) == 2 && sizeof(A32) == 4 && sizeof(A64) == 8);

enum class RegionState : std::uint32_t {
  empty = 0,         // being created: nothing in it may be used
  initialising = 1,  // sections are being written
  ready = 2,         // a daemon serves it, or died while it did
  draining = 3,      // the daemon is stopping: no new operations
  closed = 4,        // the daemon stopped in order
  recovering = 5,    // a new daemon takes it over: header and tables change
};

enum class SectionKind : std::uint32_t {
  none = 0,
  config_text = 1,
  namespaces = 2,
  clients = 3,
  groups = 4,
  segments = 5,
  index_buckets = 6,
  pages = 7,
  leases = 8,
  pin_chunks = 9,
  counters = 10,
  flight_recorder = 11,
  checksums = 12,
};
constexpr std::uint32_t kSectionCount = 12;  // every kind but none, in this order, each exactly once
constexpr std::uint32_t kMaxSections = 16;

// Where an array of equal entries lies. Offsets count from the start of the region and are 4 KiB-aligned.
struct Section {
  A32 kind;
  A32 entry_bytes;
  A64 offset;
  A64 entries;
};
static_assert(sizeof(Section) == 24);

// First page of the region. Written once before `state` becomes ready, except for the block marked "live".
struct RegionHeader {
  A64 magic;
  A32 layout_major;
  A32 layout_minor;
  A64 layout_fingerprint;
  A64 region_bytes;
  A64 pool_bytes;
  A64 segment_bytes;
  A64 instance_epoch;  // differs for every daemon life; a takeover changes it before it touches the index
  A64 created_unix_ns;
  A64 hash_seed;           // mixed into bucket numbers
  A64 daemon_start_ticks;  // start time of daemon_pid, from /proc/<pid>/stat
  A32 daemon_pid;
  A32 section_count;
  A8 boot_id[40];       // text of the kernel's boot id
  A8 name[64];          // region name, zero-terminated
  A8 socket_path[112];  // where clients attach, zero-terminated
  A64 header_crc;       // over all the bytes above, fingerprint of the section table included
  Section sections[kMaxSections];
  // --- live ---
  alignas(kCacheLine) A32 state;  // RegionState; stored last with release when the region becomes usable
  A32 reserved0;
  alignas(kCacheLine) A64 commit_sequence;  // odd while the coordinator changes tables, even in between
  A64 operation_sequence;                   // operations executed so far
  A64 heartbeat_ns;                         // CLOCK_MONOTONIC of the coordinator's last turn
  A64 use_clock;                            // last use stamp given
};
static_assert(offsetof(RegionHeader, boot_id) == 88);
static_assert(offsetof(RegionHeader, header_crc) == 304);
static_assert(offsetof(RegionHeader, sections) == 312);
static_assert(offsetof(RegionHeader, state) == 704);
static_assert(offsetof(RegionHeader, commit_sequence) == 768);
static_assert(sizeof(RegionHeader) <= 4096);
constexpr std::uint64_t kHeaderBytes = 4096;

// A namespace: one digest of everything that makes KV data incompatible.
struct NamespaceEntry {
  A32 state;      // NamespaceState
  A32 successor;  // NamespaceId that replaced this one when its weights epoch was bumped, else none
  A64 digest[4];
  A64 base_digest[4];  // the digest without the weights epoch: what a bump addresses
  A64 weights_epoch;
  A64 shard_bytes;   // payload bytes of one shard of one page
  A64 shard_stride;  // bytes from shard to shard in the pool, 4 KiB-aligned
  A64 slot_bytes;    // shards * shard_stride
  A32 shards;        // TP size for MHA, 1 for MLA
  A32 size_class;
  A32 page_tokens;
  A32 layers;
  A64 resident_pages;
  A64 hits;
  A64 written;
  A64 evicted;
  A32 attached_clients;
  A32 bumps;     // how often the weights epoch of this base digest was bumped when this entry was made
  A8 label[64];  // model and revision for people, zero-terminated, possibly cut
};
static_assert(sizeof(NamespaceEntry) == 224);

enum class NamespaceState : std::uint32_t { free = 0, active = 1, retired = 2 };

// One attached process. Ring positions are copies of the channel's, so that they survive it.
struct alignas(kCacheLine) ClientEntry {
  A32 state;  // ClientState
  A32 generation;
  A32 pid;
  A32 uid;
  A64 start_ticks;
  A32 role;  // Role
  A32 group;
  A32 namespace_id;
  A32 tp_rank;
  A64 attached_unix_ns;
  A64 device_pages;  // pages registered, 0 before registration
  // ring positions, free-running 32-bit counters
  A32 sq_head;
  A32 sq_tail_seen;
  A32 cq_tail;
  A32 cq_head_seen;
  A32 operations_in_flight;
  A32 copies_in_flight;
  A64 operations;
  A64 errors;
  A64 bytes_written;
  A64 bytes_loaded;
  A64 last_operation_ns;
  A8 engine[64];
  A32 host_pages[kHostPageStates];  // of the client's controller, by HostPageState: what the client says
  A32 host_page_refusals;
  A64 pool_tag;                        // not 0: it maps the pool; whatever is leased to it carries this tag
  A64 host_handles[kShownHandles][2];  // that changed last: HostHandle, then its key
  A64 over_quota;                      // operations refused because of a quota of this client
  A64 reserved0;
};
static_assert(sizeof(ClientEntry) == 512);

enum class ClientState : std::uint32_t {
  free = 0,
  attached = 1,
  dying = 2,  // fenced: nothing of it is executed any more; leaves when its last copy has ended
};

// A TP group: the ranks of one engine that decide together.
struct alignas(kCacheLine) GroupEntry {
  A32 state;  // GroupState
  A32 generation;
  A32 namespace_id;
  A32 tp_size;
  A64 members_attached;  // bit per rank
  A32 scheduler;         // ClientSlot, or none
  A32 leases;
  A64 operations;
  A64 divergences;
  A8 engine[64];
  A64 reserved0[2];
};
static_assert(sizeof(GroupEntry) == 128);
constexpr std::uint32_t kMaxTpSize = 32;  // members_attached, holders and shards_done are bit sets

enum class GroupState : std::uint32_t { free = 0, active = 1, broken = 2 };

// A segment of the pool, given to one size class at a time. A slot larger than a segment takes a span of
// segments; the first of the span carries the data, the others point to it.
struct SegmentEntry {
  A32 size_class;     // none = unused
  A32 span_head;      // SegmentId of the first segment of the span
  A32 span_segments;  // on the head only
  A32 slots;          // on the head only
  A32 used_slots;     // on the head only
  A32 numa_node;      // where its memory lies; none = no matter (one node) or not known
  A64 slot_bytes;     // on the head only
};
static_assert(sizeof(SegmentEntry) == 32);

// Head of a hash chain: low 32 bits the first PageId, high 32 bits a version that is odd while the chain
// changes.
struct IndexBucket {
  A64 head;
};
static_assert(sizeof(IndexBucket) == 8);

// A logical page. First line: what lookups read. Second: what the coordinator and the tools need.
struct alignas(kCacheLine) PageEntry {
  A64 word;  // PageWord; see shm/page_word.hpp
  A64 key[4];
  A32 namespace_id;
  A32 chain_next;  // PageId in the same bucket, or none; guarded by the bucket's version
  A32 parent;      // PageId of the previous page of the prefix, or none for the first
  A32 children;    // pages whose parent is this one, whatever their state
  A64 pool_offset;
  alignas(kCacheLine) A64 shards_done;  // bit per complete shard
  A32 parent_generation;
  A32 size_class;
  A32 filler_lease;  // LeaseSlot while reserved or filling, else none
  A32 depth;         // position in its prefix, 0 = first
  A64 last_use;      // use stamp; 0 = never used
  A32 uses;          // how many requests used it
  A32 reserved0;
  A64 seal;       // hash over what identifies the page, made when it became ready; see shm/page_seal.hpp
  A64 leased_to;  // while filling or aborting: pool_tag of the ranks whose kernels may write to it, or 0
  A64 reserved1;
};
static_assert(offsetof(PageEntry, shards_done) == 64);
static_assert(sizeof(PageEntry) == 128);

// A lease: the pages that one request of one group holds. Pins in page words are derived from the chunks
// below.
struct LeaseEntry {
  A32 state;  // LeaseState
  A32 generation;
  A32 group;
  A32 namespace_id;
  A64 sequence;     // the group's sequence that made it
  A64 holders;      // bit per rank that has not released; bit 63 = scheduler
  A32 pages;        // pages of the request
  A32 hits;         // leading pages present at reserve
  A32 first_chunk;  // PinChunk index, or none
  A32 pins;         // pages pinned
};
static_assert(sizeof(LeaseEntry) == 48);
constexpr std::uint32_t kSchedulerHolderBit = 63;

enum class LeaseState : std::uint32_t { free = 0, live = 1, poisoned = 2, closing = 3 };

// Pages pinned by one lease, a link of a list.
struct alignas(kCacheLine) PinChunk {
  static constexpr std::uint32_t kPages = 13;
  A32 next;   // PinChunk index, or none
  A32 lease;  // LeaseSlot, none = on the free list
  A32 count;
  A32 pages[kPages];
};
static_assert(sizeof(PinChunk) == 64);

// The last operations, newest overwrites oldest. A reader takes an entry whose sequence is the same before
// and after.
struct alignas(kCacheLine) FlightRecord {
  A64 sequence;  // 0 while being written; else operation sequence
  A64 time_ns;   // CLOCK_MONOTONIC, refreshed once per coordinator turn with work
  A32 client;
  A32 client_generation;
  A16 opcode;
  A16 status;
  A32 detail;
  A64 lease;
  A64 user_data;
  A32 count;
  A32 event;  // FlightEvent
};
static_assert(sizeof(FlightRecord) == 64);

enum class FlightEvent : std::uint32_t {
  submit = 1,
  complete = 2,
  attach = 3,
  detach = 4,
  lost = 5,
  control = 6,
  refused_transition = 7  // an engine's controller refused `count` wrong transitions; user_data: the last one
};

constexpr std::uint32_t kNone32 = 0xffffffffu;

}  // namespace hicache
