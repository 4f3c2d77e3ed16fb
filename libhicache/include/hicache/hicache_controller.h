/* The C interface of the controller: a prefix tree, its device slots and a HiCacheController on one session,
 * for an engine's scheduler. The C++ headers in hicache/controller/ say what each call means;
 * docs/controller.md says what the ranks of a group must do alike.
 *
 * The rules of hicache.h hold: statuses, hicache_last_error, NULL, struct_size. Threads: one, the
 * scheduler's; hicache_controller_wait_layer may run on another. A slot is a token's place in device memory
 * (slot s lies in device page s / page_tokens), a node a number that is valid until the node leaves the tree.
 */
#ifndef HICACHE_HICACHE_CONTROLLER_H
#define HICACHE_HICACHE_CONTROLLER_H

#include "hicache/hicache.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct hicache_controller hicache_controller;

typedef struct hicache_controller_options {
  uint32_t struct_size;
  uint32_t selective_threshold; /* write_through_selective; 0 = 2 */
  uint64_t device_tokens;       /* device slots, whole pages */
  uint64_t host_tokens;         /* host handles, whole pages */
  uint64_t pinnable_tokens;     /* what pins may hold at most */
  const char* write_policy;     /* NULL = "write_through"; "write_through_selective", "write_back" */
  const char* eviction_policy;  /* NULL = "lru"; "lfu", "scan_resistant" */
  uint32_t load_back_threshold; /* tokens; 0 = 10 */
  uint32_t deadline_ms;         /* of operations; 0 = the daemon's default */
  uint32_t answer_timeout_ms;   /* 0 = 30,000 */
  uint32_t backup_acks; /* writes that may wait for their backup's ack at a time; 0 = none is asked for */
} hicache_controller_options;

/* The session must have its buffers registered, outlive the controller, and serve nothing else. `spec` is the
 * namespace it attached with. */
HICACHE_EXPORT hicache_status hicache_controller_create(hicache_session* session,
                                                        const hicache_namespace* spec,
                                                        const hicache_controller_options* options,
                                                        hicache_controller** controller);
/* Not before reset, unless nothing is in flight: copies may still run. */
HICACHE_EXPORT void hicache_controller_destroy(hicache_controller* controller);

/* --- Device slots. alloc evicts from the tree when too few are free; HICACHE_NO_SPACE when that is not
 * enough.
 */
HICACHE_EXPORT hicache_status hicache_controller_alloc(hicache_controller* controller, size_t tokens,
                                                       uint64_t* slots);
HICACHE_EXPORT hicache_status hicache_controller_free(hicache_controller* controller, const uint64_t* slots,
                                                      size_t count);

/* --- Tree */
typedef struct hicache_match {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t device_tokens; /* leading tokens on the device */
  uint64_t host_tokens;   /* tokens behind them that the host should have */
  int64_t device_node;    /* last node on the device; 0 = the root */
  int64_t host_node;      /* for load_back */
} hicache_match;

/* The longest known prefix. `slots` (may be NULL) gets the device slots, at most `capacity`;
 * HICACHE_TOO_LARGE, with `match` filled, when they did not fit. */
HICACHE_EXPORT hicache_status hicache_controller_match(hicache_controller* controller,
                                                       const hicache_hash* hashes, size_t count,
                                                       hicache_match* match, uint64_t* slots,
                                                       size_t capacity);
/* Adds what the pool has of the prefix beyond what the tree knows, whoever wrote it; `tokens` added. */
HICACHE_EXPORT hicache_status hicache_controller_adopt(hicache_controller* controller,
                                                       const hicache_hash* hashes, size_t count,
                                                       uint64_t* tokens);
/* Adds a prefix; slot_count = count pages of tokens. `duplicates`, room for slot_count, gets the slots that
 * the tree does not keep: the caller frees them. */
HICACHE_EXPORT hicache_status hicache_controller_insert(hicache_controller* controller,
                                                        const hicache_hash* hashes, size_t count,
                                                        const uint64_t* slots, size_t slot_count, int chunked,
                                                        int64_t* node, uint64_t* duplicates,
                                                        size_t* duplicate_count);
/* Queues a load of what the host has on the path to `node`, at most `quota` tokens. `slots`, room for
 * `quota`, gets the device slots. HICACHE_NOT_FOUND: too little is there. */
HICACHE_EXPORT hicache_status hicache_controller_load_back(hicache_controller* controller, int64_t node,
                                                           uint64_t quota, uint64_t* slots, size_t* count,
                                                           int64_t* end_node);
HICACHE_EXPORT hicache_status hicache_controller_lock(hicache_controller* controller, int64_t node);
HICACHE_EXPORT hicache_status hicache_controller_unlock(hicache_controller* controller, int64_t node);
HICACHE_EXPORT hicache_status hicache_controller_evict(hicache_controller* controller, uint64_t tokens,
                                                       uint64_t* freed);
HICACHE_EXPORT hicache_status hicache_controller_evict_host(hicache_controller* controller, uint64_t tokens,
                                                            uint64_t* freed);
HICACHE_EXPORT hicache_status hicache_controller_pin(hicache_controller* controller,
                                                     const hicache_hash* hashes, size_t count,
                                                     uint64_t until);
HICACHE_EXPORT hicache_status hicache_controller_expire_pins(hicache_controller* controller, uint64_t now);

/* --- Storage */
/* Begins to fetch from storage what the pool does not have of a request's pages; `hashes` from the prefix's
 * first page. `request` names it, the same on every rank. `policy`: hicache_prefetch_policy or
 * HICACHE_PREFETCH_DEFAULT. HICACHE_EXISTS: the request has one already. */
HICACHE_EXPORT hicache_status hicache_controller_prefetch(hicache_controller* controller, const char* request,
                                                          const hicache_hash* hashes, size_t count,
                                                          uint32_t policy);
/* Once per scheduling step and waiting request, on every rank: `ended` becomes 1 when it may run (also when
 * it has no prefetch), the same on every rank. Then the tree has taken over what the pool has: `tokens` (may
 * be NULL) of it were new to the tree. */
HICACHE_EXPORT hicache_status hicache_controller_check_prefetch_progress(hicache_controller* controller,
                                                                         const char* request, int* ended,
                                                                         uint64_t* tokens);
/* Ends it with what has come by now, as above. */
HICACHE_EXPORT hicache_status hicache_controller_terminate_prefetch(hicache_controller* controller,
                                                                    const char* request, uint64_t* tokens);
/* The request will not run: ends its prefetch, if it has one. */
HICACHE_EXPORT hicache_status hicache_controller_release_aborted_request(hicache_controller* controller,
                                                                         const char* request);

/* --- Copies */
/* Writes from now on wait for this fence before they read device memory; HICACHE_NO_FENCE = for none. */
HICACHE_EXPORT hicache_status hicache_controller_set_start_fence(hicache_controller* controller,
                                                                 uint32_t fence, uint32_t value);
/* Starts the queued loads as one batch; `producer` becomes its slot, -1 when nothing was queued. */
HICACHE_EXPORT hicache_status hicache_controller_start_loading(hicache_controller* controller,
                                                               int32_t* producer);
/* Waits for a layer of the batch in slot `consumer`; at once for -1. */
HICACHE_EXPORT hicache_status hicache_controller_wait_layer(hicache_controller* controller, int32_t consumer,
                                                            uint32_t layer, uint32_t timeout_ms);
/* Once per scheduling step, on every rank: takes note of what has ended. `ended` (may be NULL) becomes the
 * number of operations, the same on every rank. */
HICACHE_EXPORT hicache_status hicache_controller_check_events(hicache_controller* controller,
                                                              uint32_t* ended);
/* Waits for everything in flight, then forgets tree, handles and device slots. HICACHE_BUSY: a copy may still
 * run. */
HICACHE_EXPORT hicache_status hicache_controller_reset(hicache_controller* controller);
typedef enum { HICACHE_RESET_BOTH = 0, HICACHE_RESET_DEVICE = 1, HICACHE_RESET_HOST = 2 } hicache_reset_tiers;
/* The same for one tier: what the other one holds stays. */
HICACHE_EXPORT hicache_status hicache_controller_reset_tiers(hicache_controller* controller, uint32_t tiers);

/* --- Without the tree: for an engine that keeps its own. Node ids are the caller's and come back in acks;
 * below -1 they can't be taken for nodes of the tree. All ranks make these calls alike, too. */

/* Queues a copy of whole device pages to the host and starts it. `chain`: hashes from the prefix's first page
 * to the last one written, at least slot_count / page_tokens. `host_slots` gets slot_count handles.
 * HICACHE_NO_SPACE: too few handles. */
HICACHE_EXPORT hicache_status hicache_controller_write(hicache_controller* controller,
                                                       const uint64_t* device_slots, size_t slot_count,
                                                       const hicache_hash* chain, size_t chain_count,
                                                       int64_t node, uint64_t* host_slots);

/* Host pages that can't be evicted until they are loaded or let go. */
typedef struct hicache_hold {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t lease;
  uint64_t sequence;
  uint64_t tokens; /* leading tokens that can be loaded */
  uint64_t
      present_tokens; /* leading tokens that are there: more, where a hybrid model's states are missing */
} hicache_hold;
HICACHE_EXPORT hicache_status hicache_controller_hold(hicache_controller* controller,
                                                      const uint64_t* host_slots, size_t count,
                                                      hicache_hold* hold);
HICACHE_EXPORT hicache_status hicache_controller_let_go(hicache_controller* controller,
                                                        const hicache_hold* hold);
/* Takes device slots and queues their load from held pages, `count` <= hold->tokens; the hold goes with it.
 * Nothing moves before start_loading. HICACHE_NO_SPACE: too few device slots, the hold stays. */
HICACHE_EXPORT hicache_status hicache_controller_load(hicache_controller* controller,
                                                      const hicache_hold* hold, const uint64_t* host_slots,
                                                      size_t count, int64_t node, uint64_t* device_slots);
/* Frees device slots. With host slots: they must be synced, and become the only copy. */
HICACHE_EXPORT hicache_status hicache_controller_evict_device_slots(hicache_controller* controller,
                                                                    const uint64_t* device_slots,
                                                                    size_t device_count,
                                                                    const uint64_t* host_slots,
                                                                    size_t host_count);
/* Gives up handles of backups. */
HICACHE_EXPORT hicache_status hicache_controller_evict_host_slots(hicache_controller* controller,
                                                                  const uint64_t* host_slots, size_t count);

typedef enum { HICACHE_ACK_LOAD = 0, HICACHE_ACK_WRITE = 1, HICACHE_ACK_BACKUP = 3 } hicache_ack_kind;
typedef struct hicache_ack {
  uint32_t kind;        /* hicache_ack_kind */
  int32_t status;       /* hicache_status: HICACHE_OK, or not everything is where it should be */
  int64_t node;         /* a batch of loads has an ack for each of its nodes */
  uint64_t sequence;    /* the group's */
  uint64_t epoch;       /* grows with every reset */
  uint64_t tokens;      /* of the operation, the whole batch */
  uint64_t host_tokens; /* write: leading tokens that the host holds now; backup: tokens that storage holds */
} hicache_ack;
/* As check_events, and tells what has ended: at most `capacity` acks now, the rest with the next calls. */
HICACHE_EXPORT hicache_status hicache_controller_take_acks(hicache_controller* controller, hicache_ack* acks,
                                                           size_t capacity, size_t* count);

/* With hicache_controller_options.backup_acks: the acks of backups that have ended, one for each write (and
 * each of its nodes), at most `capacity` now. Every rank gets the same ones, but not at the same call: no
 * decision may depend on when. When the daemon is lost, each that is open comes once with HICACHE_DAEMON_LOST
 * before the call fails. */
HICACHE_EXPORT hicache_status hicache_controller_take_backup_acks(hicache_controller* controller,
                                                                  hicache_ack* acks, size_t capacity,
                                                                  size_t* count);

/* --- Prefixes that stay in the daemon's pool for a time, up to a number of pages. Held by a session of its
 * own, attached as the engine's scheduler: nothing of the ranks waits for them, and they end with it. One
 * thread. */
typedef struct hicache_pool_pins hicache_pool_pins;
/* `session` outlives the pins and serves nothing else that reserves. `timeout_ms`: how long a call waits for
 * the daemon; 0 = 10,000. */
HICACHE_EXPORT hicache_status hicache_pool_pins_create(hicache_session* session, uint64_t max_pages,
                                                       uint32_t timeout_ms, hicache_pool_pins** pins);
/* Gives everything back. */
HICACHE_EXPORT void hicache_pool_pins_destroy(hicache_pool_pins* pins);
/* Keeps the leading pages of this prefix that the pool has now until `until`, a clock of the caller's;
 * `pages` (may be NULL) becomes their number. HICACHE_NOT_FOUND: there are none. HICACHE_NO_SPACE: more than
 * max_pages.
 */
HICACHE_EXPORT hicache_status hicache_pool_pins_pin(hicache_pool_pins* pins, const hicache_hash* hashes,
                                                    size_t count, uint64_t until, uint32_t* pages);
/* Gives back every pin whose time has come; `pages` (may be NULL) becomes the number of pages still pinned.
 */
HICACHE_EXPORT hicache_status hicache_pool_pins_expire(hicache_pool_pins* pins, uint64_t now,
                                                       uint64_t* pages);

typedef enum {
  HICACHE_HOST_PAGE_IDLE = 0,
  HICACHE_HOST_PAGE_RESERVED = 1,
  HICACHE_HOST_PAGE_PROTECTED = 2,
  HICACHE_HOST_PAGE_SYNCED = 3,
  HICACHE_HOST_PAGE_BACKUP = 4
} hicache_host_page_state;
/* The one state of all these handles; HICACHE_BUSY when they differ. */
HICACHE_EXPORT hicache_status hicache_controller_host_page_state(hicache_controller* controller,
                                                                 const uint64_t* host_slots, size_t count,
                                                                 uint32_t* state);
/* How many pages are in each of the five states (`pages` may be NULL), and how many wrong transitions were
 * refused. */
HICACHE_EXPORT hicache_status hicache_controller_host_pages(hicache_controller* controller, uint64_t* pages,
                                                            uint64_t* refused);

#ifdef __cplusplus
}
#endif

#endif
