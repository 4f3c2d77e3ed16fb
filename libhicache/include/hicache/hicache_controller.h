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
  uint32_t reserved;            /* 0 */
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

#ifdef __cplusplus
}
#endif

#endif
