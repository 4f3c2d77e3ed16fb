/* The C interface of hicache: everything of client.hpp, for C and, through dlopen, for every other language.
 *
 * Growth: structs begin with `struct_size`, which the caller sets to sizeof of the struct it was compiled
 * with. A newer library takes missing fields as zero and fills only what fits; an older one refuses fields it
 * does not know unless they are zero. Functions are never removed or changed within a version node of the
 * shared library.
 *
 * Errors: functions return a hicache_status unless said otherwise. hicache_last_error() then holds a sentence
 * for a person. NULL where a pointer is required is HICACHE_INVALID_ARGUMENT, never a crash. Nothing throws.
 * Threads: a session may be used from several threads, except that hicache_session_destroy must be the last
 * call on it. hicache_probe takes no lock. Blocking: only functions with a timeout_ms parameter block, at
 * most that long. Fork: in a forked child, calls on a parent's session return HICACHE_FORKED; destroying it
 * there is safe. Text is UTF-8 and zero-terminated. Strings passed in are copied before the call returns.
 */
#ifndef HICACHE_HICACHE_H
#define HICACHE_HICACHE_H

#include <stddef.h>
#include <stdint.h>

#include "hicache/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Grows when something incompatible happens to this interface. */
#define HICACHE_ABI_VERSION 1u

/* --- Status
 * ------------------------------------------------------------------------------------------------------ */

/* A status is an int32_t that holds one of these. */
typedef int32_t hicache_status;
enum {
  HICACHE_OK = 0,
  HICACHE_AGAIN = 1,             /* ring, arena, table or quota full for now: poll, then try again */
  HICACHE_BUSY = 2,              /* in use, or being filled by somebody else */
  HICACHE_TIMED_OUT = 3,         /* the deadline or the time-out passed */
  HICACHE_INVALID_ARGUMENT = 4,  /* a value is out of its range; nothing was done */
  HICACHE_NOT_FOUND = 5,         /* no such thing */
  HICACHE_UNKNOWN_LEASE = 6,     /* the lease never was, or is not this group's */
  HICACHE_STALE_GENERATION = 7,  /* the lease, client or page has been reused since */
  HICACHE_ALREADY_RELEASED = 8,  /* a second release of the same thing by the same rank */
  HICACHE_NOT_PERMITTED = 9,     /* the role, user or configuration forbids it */
  HICACHE_DIVERGED = 10,         /* this rank posted something else than its group for one sequence */
  HICACHE_POISONED = 11,         /* a rank of the group diverged; everything on this lease fails */
  HICACHE_PEER_LOST = 12,        /* a rank of the group is gone; the group has ended */
  HICACHE_DAEMON_LOST = 13,      /* the daemon died or dropped this session: attach again */
  HICACHE_DAEMON_ABSENT = 14,    /* nothing listens at the socket */
  HICACHE_VERSION_MISMATCH = 15, /* protocol or layout versions do not overlap */
  HICACHE_NO_SPACE = 16,         /* no page or pool slot could be freed, or no memory */
  HICACHE_TOO_LARGE = 17,        /* more pages or bytes than one operation or the configuration allows */
  HICACHE_FORKED = 18,           /* the session belongs to the parent process */
  HICACHE_CLOSED = 19,           /* the session was closed by this side */
  HICACHE_CORRUPT = 20,          /* shared memory does not hold what it must hold */
  HICACHE_SYSTEM_ERROR = 21,     /* a system call failed */
  HICACHE_SHUTTING_DOWN = 22,    /* the daemon drains */
  HICACHE_EXISTS = 23,           /* it is already there */
  HICACHE_DROPPED = 24,          /* page: not kept (no room, parent lost, or aborted) */
  HICACHE_INTERNAL = 25          /* a bug of hicache */
};

/* Name of a status such as "timed_out"; "unknown_status" for any other number. Static storage. */
HICACHE_EXPORT const char* hicache_status_name(hicache_status status);
/* Version of the library, "major.minor.patch". Static storage. */
HICACHE_EXPORT const char* hicache_version(void);
/* HICACHE_ABI_VERSION of the library that is loaded. */
HICACHE_EXPORT uint32_t hicache_abi_version(void);
/* What went wrong in this thread's last call that returned an error; "" before the first. Valid until the
 * thread's next call into the library. */
HICACHE_EXPORT const char* hicache_last_error(void);

/* --- Namespaces and hashes
 * ---------------------------------------------------------------------------------------- */

typedef enum { HICACHE_ATTENTION_MHA = 1, HICACHE_ATTENTION_MLA = 2 } hicache_attention;

/* Data that a page of a hybrid model has besides KV (SidePool in shm/namespace_spec.hpp). */
typedef enum { HICACHE_HIT_ALL_PAGES = 1, HICACHE_HIT_TRAILING_PAGES = 2 } hicache_hit_rule;
typedef struct {
  const char* name;     /* unique in the namespace */
  uint32_t rule;        /* hicache_hit_rule */
  uint32_t layers;      /* tensors of the pool */
  uint64_t piece_bytes; /* of one tensor's part of a page, or of one state; a multiple of 8 */
} hicache_side_pool;

/* Everything that makes KV data incompatible. Two engines share pages exactly when all of it agrees. */
typedef struct {
  uint32_t struct_size;
  uint32_t attention; /* hicache_attention */
  const char* model;  /* NULL is the same as "", here and below */
  const char* revision;
  const char* dtype;        /* element type of the KV data, such as "bfloat16" */
  const char* quantization; /* of the KV data */
  const char* kv_scales;    /* digest or name of the scale set */
  const char* rope;         /* RoPE settings in the engine's canonical text */
  const char* overrides;    /* other config overrides that change KV data */
  const char* draft_model;  /* "" = no draft KV in the page */
  const char* layout;       /* byte order inside a page; NULL = "page_first_direct" */
  const char* lora_id;      /* NULL = absent, which differs from "" */
  const char* cache_salt;   /* NULL = absent, which differs from "" */
  uint64_t weights_epoch;   /* grows when weights are updated in place */
  uint32_t page_tokens;
  uint32_t first_layer;     /* of this pipeline stage */
  uint32_t layers;          /* of this pipeline stage */
  uint32_t heads_per_shard; /* KV heads (MHA), 1 for MLA */
  uint32_t head_dim;        /* elements of a head; latent plus rope for MLA */
  uint32_t element_bytes;
  uint32_t tp_size;
  uint32_t format_version;             /* 0 = the current one */
  const hicache_side_pool* side_pools; /* of a hybrid model */
  uint32_t side_pool_count;
  uint32_t reserved; /* 0 */
} hicache_namespace;

/* 32 raw bytes of a page's SHA-256 prefix hash. Alignment 1. */
typedef struct {
  uint8_t bytes[32];
} hicache_hash;

/* Digest over all ingredients of a namespace. */
HICACHE_EXPORT hicache_status hicache_namespace_digest(const hicache_namespace* spec, hicache_hash* digest);
/* Prior of page 0 in the hash chain, from lora_id and cache_salt. HICACHE_NOT_FOUND when the namespace has
 * none. */
HICACHE_EXPORT hicache_status hicache_namespace_seed(const hicache_namespace* spec, hicache_hash* seed);
/* Hashes of all full pages of a token sequence: token_count / page_tokens of them, written to `hashes`.
 * `seed` may be NULL. */
HICACHE_EXPORT hicache_status hicache_hash_chain(const uint32_t* tokens, size_t token_count,
                                                 uint32_t page_tokens, const hicache_hash* seed,
                                                 hicache_hash* hashes);

/* --- Sessions
 * ----------------------------------------------------------------------------------------------------- */

typedef struct hicache_session hicache_session;

typedef enum { HICACHE_ROLE_RANK = 1, HICACHE_ROLE_SCHEDULER = 2 } hicache_role;

/* Who moves the pages of a rank: the daemon, or the rank itself on the pool that it maps. */
typedef enum { HICACHE_IO_DIRECT = 0, HICACHE_IO_KERNEL = 1 } hicache_io_backend;

typedef struct {
  uint32_t struct_size;
  uint32_t role;           /* hicache_role */
  const char* name;        /* daemon's name, looked up at its default socket path ... */
  const char* socket_path; /* ... or the path itself, which wins; NULL = use the name */
  const char* engine;      /* instance id: ranks with equal engine and namespace form one TP group */
  uint32_t tp_rank;
  uint32_t timeout_ms; /* for the whole attach; 0 = 10 s */
  const hicache_namespace* spec;
  /* Not 0: when the daemon dies, a thread of the session attaches to the next one by itself and registers the
   * same buffers again. The session goes on once the results of the lost one have been read. */
  uint32_t reattach;
  /* hicache_io_backend. Kernel: HICACHE_NOT_PERMITTED, naming the engine, unless the daemon's configuration
   * lets it map the pool; it never falls back to direct. */
  uint32_t io_backend;
} hicache_attach_options;

typedef struct {
  uint32_t struct_size;
  uint32_t namespace_id; /* index in the daemon's table; follows bumps of the weights epoch */
  uint32_t tp_rank;
  uint32_t tp_size;
  uint32_t client_slot;
  uint32_t reserved;
  uint64_t instance_epoch;      /* of the daemon's life */
  uint64_t parks;               /* times a wait went to sleep */
  uint64_t late_wakes;          /* sleeps that timed out on work published more than 1 ms before */
  uint64_t ignored_completions; /* completions that matched no open operation */
  uint64_t expired;             /* operations ended by this side because the daemon let their deadline pass */
} hicache_session_info;

/* Attaches to a daemon; blocks at most options->timeout_ms. HICACHE_DAEMON_ABSENT when nobody listens,
 * HICACHE_VERSION_MISMATCH with both sides' versions, HICACHE_INVALID_ARGUMENT naming the field,
 * HICACHE_EXISTS when a live process has that rank. *session is NULL after an error; else the caller destroys
 * it. */
HICACHE_EXPORT hicache_status hicache_attach(const hicache_attach_options* options,
                                             hicache_session** session);
/* Ends the session; open operations end with HICACHE_CLOSED and can still be polled. Further calls are fine.
 */
HICACHE_EXPORT hicache_status hicache_close(hicache_session* session);
/* Closes and frees. NULL is fine. No other call on the session may be running or follow. */
HICACHE_EXPORT void hicache_session_destroy(hicache_session* session);
/* HICACHE_OK, or why the session has ended. */
HICACHE_EXPORT hicache_status hicache_state(const hicache_session* session);
HICACHE_EXPORT hicache_status hicache_session_get_info(const hicache_session* session,
                                                       hicache_session_info* info);

/* --- Device buffers
 * ----------------------------------------------------------------------------------------------- */

/* Memory that the daemon can map: a sealed memfd and its mapping. */
typedef struct hicache_buffer hicache_buffer;

HICACHE_EXPORT hicache_status hicache_buffer_create(uint64_t bytes, hicache_buffer** buffer);
HICACHE_EXPORT void* hicache_buffer_data(const hicache_buffer* buffer);    /* NULL for NULL */
HICACHE_EXPORT uint64_t hicache_buffer_size(const hicache_buffer* buffer); /* 0 for NULL */
HICACHE_EXPORT int hicache_buffer_fd(const hicache_buffer* buffer); /* stays the buffer's; -1 for NULL */
/* Unmaps and closes. The daemon keeps its own mapping as long as the session lives. NULL is fine. */
HICACHE_EXPORT void hicache_buffer_destroy(hicache_buffer* buffer);

typedef enum {
  HICACHE_TENSOR_K = 0,
  HICACHE_TENSOR_V = 1,
  HICACHE_TENSOR_LATENT = 2,
  HICACHE_TENSOR_SIDE = 3
} hicache_tensor_kind;

/* Page p of the tensor lies at offset + p * page_stride in its allocation and has page_bytes bytes. */
typedef struct {
  uint32_t allocation; /* index into the descriptors */
  uint32_t layer;      /* 0-based within this pipeline stage, or within the side pool */
  uint32_t kind;       /* hicache_tensor_kind */
  uint32_t pool;       /* side: index in side_pools; else 0 */
  uint64_t offset;
  uint64_t page_stride;
  uint64_t page_bytes;
} hicache_tensor;

/* An exported host allocation: a sealed memfd, which stays the caller's, and its size. */
typedef struct {
  int32_t fd;
  uint32_t reserved; /* 0 */
  uint64_t bytes;
} hicache_allocation;

/* How many slots each tensor of a trailing pool has (a tensor's "page" is a slot there). Before the buffers
 * are registered; 0 unless told. */
HICACHE_EXPORT hicache_status hicache_set_state_slots(hicache_session* session, uint32_t slots);

/* Hands the device buffers over, once per session: each (layer, kind) of the namespace exactly once, `pages`
 * device pages in every tensor. Blocks until the daemon has mapped them, at most timeout_ms. */
HICACHE_EXPORT hicache_status hicache_register_buffers(hicache_session* session,
                                                       const hicache_allocation* allocations,
                                                       size_t allocation_count, const hicache_tensor* tensors,
                                                       size_t tensor_count, uint32_t pages,
                                                       uint32_t timeout_ms);

/* GPU memory that tensors lie in; may begin anywhere inside an allocation and must end inside it. */
typedef struct {
  const void* pointer;
  uint64_t bytes;
} hicache_cuda_range;

/* The same for GPU memory; a tensor's `allocation` is an index into the ranges. HICACHE_NOT_PERMITTED with
 * the reason for memory that no other process can open (cudaMallocAsync, managed memory, cuMemCreate without
 * an exportable handle), HICACHE_NOT_FOUND when CUDA is off. */
HICACHE_EXPORT hicache_status hicache_register_cuda_buffers(hicache_session* session,
                                                            const hicache_cuda_range* ranges,
                                                            size_t range_count, const hicache_tensor* tensors,
                                                            size_t tensor_count, uint32_t pages,
                                                            uint32_t timeout_ms);

/* --- Operations
 * --------------------------------------------------------------------------------------------------- */

typedef uint64_t hicache_ticket; /* an operation in flight, unique in its session; 0 = none */
typedef uint64_t hicache_lease;  /* 0 = none */

typedef enum {
  HICACHE_OP_NOP = 1,
  HICACHE_OP_RESERVE = 2,
  HICACHE_OP_WRITE = 3,
  HICACHE_OP_LOAD = 4,
  HICACHE_OP_RELEASE = 5,
  HICACHE_OP_AGREE = 6,
  HICACHE_OP_PREFETCH = 7,
  HICACHE_OP_CHECK_PREFETCH = 8,
  HICACHE_OP_END_PREFETCH = 9,
  HICACHE_OP_BACKUP = 10
} hicache_opcode;

/* When a prefetch counts as done, besides the arrival of its last page. */
typedef enum {
  HICACHE_PREFETCH_BEST_EFFORT = 0,   /* when somebody asks */
  HICACHE_PREFETCH_WAIT_COMPLETE = 1, /* never */
  HICACHE_PREFETCH_TIMEOUT = 2        /* when its time limit has passed */
} hicache_prefetch_policy;

#define HICACHE_PREFETCH_DEFAULT 0xffffffffu /* as the daemon is configured */

#define HICACHE_NO_FENCE 0xffffffffu

/* How many leading pages are present now. A hint: no daemon, no system call, no lock. 0 once the session has
 * ended. `busy` (may be NULL) becomes 1 when the lookup gave up on a place that kept changing. */
HICACHE_EXPORT hicache_status hicache_probe(const hicache_session* session, const hicache_hash* hashes,
                                            size_t count, uint32_t* leading, uint32_t* busy);

/* Each of these posts one operation and stores its ticket, without blocking. HICACHE_AGAIN: ring, arena or
 * completion slots are full, read results first. deadline_ms 0 = the daemon's default. */
HICACHE_EXPORT hicache_status hicache_nop(hicache_session* session, uint32_t deadline_ms,
                                          hicache_ticket* ticket);
/* Opens a lease on a request's pages and pins the leading hits. `sequence` > 0 orders the group's requests:
 * all ranks post the same hashes under the same sequence and get the same answer. */
HICACHE_EXPORT hicache_status hicache_reserve(hicache_session* session, uint64_t sequence,
                                              const hicache_hash* hashes, size_t count, uint32_t deadline_ms,
                                              hicache_ticket* ticket);
/* Copies pages [first, first + count) of the lease's request from this rank's device pages to the pool, after
 * write fence `fence` reached `fence_value` (HICACHE_NO_FENCE: at once). All ranks of the group post the same
 * range. */
HICACHE_EXPORT hicache_status hicache_write(hicache_session* session, hicache_lease lease, uint32_t first,
                                            const uint32_t* device_pages, size_t count, uint32_t fence,
                                            uint32_t fence_value, uint32_t deadline_ms,
                                            hicache_ticket* ticket);
/* Copies ready pages of the lease to this rank's device pages. Producer slot `fence` (HICACHE_NO_FENCE: none)
 * announces every layer with `fence_value`. */
HICACHE_EXPORT hicache_status hicache_load(hicache_session* session, hicache_lease lease, uint32_t first,
                                           const uint32_t* device_pages, size_t count, uint32_t fence,
                                           uint32_t fence_value, uint32_t deadline_ms,
                                           hicache_ticket* ticket);
/* The same for a namespace with trailing pools. `states` has one entry for each page: the state slot with
 * what belongs to the page's end, or 0xffffffff. All ranks write states of the same pages; a load of states
 * that the page does not have ends with HICACHE_NOT_FOUND. */
HICACHE_EXPORT hicache_status hicache_write_with_states(hicache_session* session, hicache_lease lease,
                                                        uint32_t first, const uint32_t* device_pages,
                                                        const uint32_t* states, size_t count, uint32_t fence,
                                                        uint32_t fence_value, uint32_t deadline_ms,
                                                        hicache_ticket* ticket);
HICACHE_EXPORT hicache_status hicache_load_with_states(hicache_session* session, hicache_lease lease,
                                                       uint32_t first, const uint32_t* device_pages,
                                                       const uint32_t* states, size_t count, uint32_t fence,
                                                       uint32_t fence_value, uint32_t deadline_ms,
                                                       hicache_ticket* ticket);
/* This rank needs the lease no more. */
HICACHE_EXPORT hicache_status hicache_release(hicache_session* session, hicache_lease lease,
                                              uint32_t deadline_ms, hicache_ticket* ticket);
/* Fetches pages [first, first + count) of the lease's request from storage, as many leading ones as it has.
 * The group decides once; all ranks that want the result post the same range, one a lease. Pages become ready
 * one by one in prefix order, pinned by the lease, and can be loaded before the operation has ended. The
 * leading present + written pages of the range are ready at its end. `policy`: hicache_prefetch_policy or
 * HICACHE_PREFETCH_DEFAULT. */
HICACHE_EXPORT hicache_status hicache_prefetch(hicache_session* session, hicache_lease lease, uint32_t first,
                                               uint32_t count, uint32_t policy, uint32_t deadline_ms,
                                               hicache_ticket* ticket);
/* May the request go on? `number` counts the questions about this prefetch from 1; every rank gets the same
 * answer to the same one. filling > 0: not yet. Otherwise the result is the prefetch's. */
HICACHE_EXPORT hicache_status hicache_check_prefetch(hicache_session* session, hicache_lease lease,
                                                     uint32_t number, uint32_t deadline_ms,
                                                     hicache_ticket* ticket);
/* As hicache_check_prefetch, and the answer is yes: what has not come by now is given up. */
HICACHE_EXPORT hicache_status hicache_end_prefetch(hicache_session* session, hicache_lease lease,
                                                   uint32_t number, uint32_t deadline_ms,
                                                   hicache_ticket* ticket);

/* The acknowledgement of a backup: ends, once, when for each page [first, first + count) of the lease's
 * request it is known whether storage holds it (`written`) or not (`dropped`). Pages that are ready, not in
 * storage and not on their way there are queued, unless the daemon's backup policy is none. The lease may be
 * released meanwhile. */
HICACHE_EXPORT hicache_status hicache_backup(hicache_session* session, hicache_lease lease, uint32_t first,
                                             uint32_t count, uint32_t deadline_ms, hicache_ticket* ticket);

/* How an operation ended: exactly one per ticket, except that one with `pages_busy` is followed by one with
 * `pages_returned`. */
typedef struct {
  uint32_t struct_size;
  uint32_t opcode; /* hicache_opcode */
  hicache_ticket ticket;
  hicache_lease lease;
  hicache_status status;
  uint32_t hits; /* reserve: leading pages present and pinned; prefetch: that storage had */
  /* write: pages published by it, counted once per group; prefetch: that came; backup: that storage holds */
  uint32_t written;
  uint32_t present;            /* write, prefetch: pages that were ready already, or came from elsewhere */
  uint32_t filling;            /* write: another lease was filling them; check_prefetch: 0 = it has ended */
  uint32_t dropped;            /* write, backup: pages not kept; prefetch: pages that did not come */
  uint64_t bytes;              /* write, load: bytes copied for this rank */
  uint64_t operation_sequence; /* the daemon's global order */
  uint32_t pages_busy;     /* 1: a copy may still touch the device pages, keep them until pages_returned */
  uint32_t pages_returned; /* 1: not an end, the device pages of `ticket` are free again */
  /* Write: one status per page (HICACHE_OK, _EXISTS, _BUSY, _DROPPED). The caller gives the array or NULL and
   * its length; `page_status_count` becomes the number of pages, of which at most the capacity was stored. */
  hicache_status* page_status;
  uint32_t page_status_capacity;
  uint32_t page_status_count;
} hicache_result;

/* Next completion if there is one, else HICACHE_AGAIN. Never blocks. */
HICACHE_EXPORT hicache_status hicache_poll(hicache_session* session, hicache_result* result);
/* Waits for the next event of `ticket`, keeping others for poll. HICACHE_TIMED_OUT leaves the operation open.
 */
HICACHE_EXPORT hicache_status hicache_wait(hicache_session* session, hicache_ticket ticket,
                                           uint32_t timeout_ms, hicache_result* result);
/* Waits for any completion. */
HICACHE_EXPORT hicache_status hicache_wait_any(hicache_session* session, uint32_t timeout_ms,
                                               hicache_result* result);

/* Stores a write fence's value. Values only grow (cyclically, by less than 2^31); a smaller one is ignored.
 */
HICACHE_EXPORT hicache_status hicache_raise_write_fence(hicache_session* session, uint32_t index,
                                                        uint32_t value);
/* 1 when `layer` was announced with `value` in producer slot `slot`, else 0. A failed load announces its
 * layers too: ask its result before the data is used. */
HICACHE_EXPORT int hicache_layer_ready(const hicache_session* session, uint32_t slot, uint32_t value,
                                       uint32_t layer);
/* Waits for it, at most timeout_ms. Returns the load's status when it failed: a released wait means failed.
 */
HICACHE_EXPORT hicache_status hicache_wait_layer(hicache_session* session, uint32_t slot, uint32_t value,
                                                 uint32_t layer, uint32_t timeout_ms);

/* The same fences in CUDA streams (CUstream or cudaStream_t). Work put into the stream after a wait runs when
 * the layer has landed or the load has failed: ask hicache_load_result before its output is used. The load
 * must have been posted. */
HICACHE_EXPORT hicache_status hicache_stream_wait_layer(hicache_session* session, void* stream, uint32_t slot,
                                                        uint32_t value, uint32_t layer);
HICACHE_EXPORT hicache_status hicache_stream_raise_write_fence(hicache_session* session, void* stream,
                                                               uint32_t index, uint32_t value);
/* HICACHE_OK when every layer of the load has landed, else why it failed. Waits for its end at most
 * timeout_ms.
 */
HICACHE_EXPORT hicache_status hicache_load_result(hicache_session* session, uint32_t slot, uint32_t value,
                                                  uint32_t timeout_ms);

/* --- Control
 * ------------------------------------------------------------------------------------------------------ */

/* Asks a daemon for something, as hicache-ctl does; blocks at most timeout_ms. The answer is JSON text,
 * stored zero-terminated in `answer` when `capacity` allows; `needed` (may be NULL) becomes its size with the
 * zero. HICACHE_TOO_LARGE when it did not fit. */
HICACHE_EXPORT hicache_status hicache_control(const char* socket_path, const char* const* arguments,
                                              size_t argument_count, uint32_t timeout_ms, char* answer,
                                              size_t capacity, size_t* needed);
/* Where a daemon called `name` listens unless its configuration says otherwise. Storage as in
 * hicache_control. */
HICACHE_EXPORT hicache_status hicache_default_socket_path(const char* name, char* path, size_t capacity,
                                                          size_t* needed);

#ifdef __cplusplus
}
#endif

#endif /* HICACHE_HICACHE_H */
