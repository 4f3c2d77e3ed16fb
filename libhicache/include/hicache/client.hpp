// The C++ interface of hicache for an inference engine: attach, register device buffers, and ask for pages.
// hicache.h is the same for C and, through dlopen, for every other language.
//
// A request's life:  probe (optional) -> reserve -> load the hits -> write what was missing -> release.
//
// Thread safety: a Session may be used from several threads; calls exclude each other on an internal mutex,
// except `probe`, which takes none. `wait` and `wait_layer` release the mutex while they sleep. Blocking:
// only `attach`, `register_buffers`, `wait`, `wait_layer` and `close` block, each at most for the time given.
// Errors: values (Status, Result). No call throws after construction; none hangs when the daemon is stopped
// or dead. Fork: a child must not use its parent's session; every call there returns Status::forked.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "hicache/export.h"
#include "hicache/io_backend.hpp"
#include "shm/channel_layout.hpp"
#include "shm/device_geometry.hpp"
#include "shm/fd.hpp"
#include "shm/host_page_state.hpp"
#include "shm/namespace_spec.hpp"
#include "shm/prefix_index.hpp"
#include "shm/protocol.hpp"
#include "shm/socket_path.hpp"
#include "shm/status.hpp"
#include "shm/types.hpp"

namespace hicache {

struct AttachOptions {
  std::string name;         // daemon's name, looked up at the default socket path ...
  std::string socket_path;  // ... or the path itself, which wins
  Role role = Role::rank;
  std::string engine;  // instance id: ranks with equal engine and namespace form one TP group
  std::uint32_t tp_rank = 0;
  NamespaceSpec spec;                 // tp_size included
  std::uint32_t timeout_ms = 10'000;  // for the whole attach
  // After the daemon was lost, a thread of the session attaches again as soon as one answers, with the same
  // device buffers. The session goes on there once every result of the lost one has been read (pages_returned
  // included); until then, and while no daemon answers, calls return daemon_lost. Leases do not survive.
  bool reattach = false;
  // Who moves this rank's pages. kernel: attach fails with not_permitted, naming the engine, unless the
  // daemon's configuration lets this engine map the pool (pool.map_engines); it never falls back to direct.
  // The session maps the whole pool and has a thread that serves the daemon's requests.
  IoBackend io_backend = IoBackend::direct;
  // GPU memory that the session allocates beside registered GPU buffers: short pieces of pages go through it
  // (docs/gpu.md). 0 = none, and such pieces move slowly.
  std::uint64_t staging_bytes = 256 * kMiB;
};

struct CudaRange;  // hicache/cuda.hpp

// A host device buffer: memory that the daemon can map. Owns its sealed memfd and mapping.
class HICACHE_EXPORT HostDeviceBuffer {
 public:
  static Result<HostDeviceBuffer> create(std::uint64_t bytes);
  HostDeviceBuffer(HostDeviceBuffer&&) noexcept;
  HostDeviceBuffer& operator=(HostDeviceBuffer&&) noexcept;
  ~HostDeviceBuffer();
  [[nodiscard]] std::uint8_t* data() const;
  [[nodiscard]] std::uint64_t size() const;
  [[nodiscard]] int fd() const;

 private:
  struct Impl;
  explicit HostDeviceBuffer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Handle of an operation in flight, unique in its session. 0 = none.
struct Ticket {
  std::uint64_t value = 0;
  explicit operator bool() const { return value != 0; }
  friend bool operator==(Ticket, Ticket) = default;
};

// How an operation ended. Exactly one per ticket, except that one with `pages_busy` is followed by
// `pages_returned`.
struct OperationResult {
  Ticket ticket;
  Opcode opcode = Opcode::none;
  Status status = Status::ok;
  LeaseId lease;
  std::uint32_t hits = 0;  // reserve; prefetch: pages that storage had
  // write: pages published by it, counted once per group; prefetch: that came; backup: that storage holds
  std::uint32_t written = 0;
  // write, prefetch: pages that were ready already, or came from elsewhere; reserve: leading pages present,
  // more than hits where states are missing (hybrid models)
  std::uint32_t present = 0;
  std::uint32_t filling = 0;  // write: pages that another lease was filling; check_prefetch: 0 = it has ended
  std::uint32_t dropped = 0;  // write, backup: pages not kept; prefetch: pages that did not come
  std::uint64_t bytes = 0;    // write, load: bytes copied for this rank
  std::uint64_t operation_sequence = 0;  // the daemon's global order
  std::uint64_t agreed = 0;              // agree: the group's last sequence that has ended
  bool agreed_failed = false;            // agree: a load of it did not end well on some rank
  bool pages_busy = false;          // a copy may still touch the device pages: keep them until pages_returned
  bool pages_returned = false;      // not an end: the device pages of `ticket` are free again
  std::vector<Status> page_status;  // write: one per page: ok, exists, busy, dropped
};

// When a write may read its device pages: after write fence `index` reached `value`. Raise it with
// raise_write_fence.
struct WriteFence {
  std::uint32_t index = 0;  // below kWriteFences
  std::uint32_t value = 0;
};

// Where a load announces its layers: producer slot (below kProducerSlots) and the value each layer's word
// gets. Values of a slot grow from load to load, by less than 2^31, starting above 0.
struct LayerFence {
  std::uint32_t slot = 0;
  std::uint32_t value = 0;
};

// What a session counted about itself since attach.
struct SessionCounters {
  std::uint64_t parks = 0;                // times a wait went to sleep
  std::uint64_t late_wakes = 0;           // sleeps that timed out on work published more than 1 ms before
  std::uint64_t ignored_completions = 0;  // completions that matched no open operation: a damaged daemon
  std::uint64_t expired = 0;              // operations ended here because the daemon let their deadline pass
};

class HICACHE_EXPORT Session {
 public:
  // Attaches to a daemon. daemon_absent when nobody listens, version_mismatch with both sides' versions,
  // invalid_argument naming the field, timed_out. The session ends when the object goes.
  static Result<std::unique_ptr<Session>> attach(const AttachOptions& options);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Hands the device buffers over, once. `fds` are the allocations' sealed memfds, in the geometry's order;
  // they stay the caller's. Blocks until the daemon has mapped them, at most timeout_ms.
  Outcome register_buffers(const DeviceGeometry& geometry, std::span<const int> fds,
                           std::uint32_t timeout_ms = 10'000);

  // How many leading pages are present now. A hint, no daemon, no system call, wait-free for other callers.
  // Follows a namespace bump. 0 once the session is lost.
  [[nodiscard]] ProbeResult probe(std::span<const PrefixHash> hashes) const;

  // Each of these posts one operation and returns its ticket, or again (ring, arena or completion slots full:
  // poll first), too_large, daemon_lost, forked, closed. deadline_ms 0 = the daemon's default.
  Result<Ticket> nop(std::uint32_t deadline_ms = 0);
  // Opens a lease on a request's pages: pins the leading hits. `sequence` > 0 orders the group's requests:
  // all ranks post the same hashes under the same sequence and get the same answer.
  // Agreements wait for sequences that are `agreed`; the others are counted by themselves.
  Result<Ticket> reserve(std::uint64_t sequence, std::span<const PrefixHash> hashes,
                         std::uint32_t deadline_ms = 0, SequenceOrder order = SequenceOrder::agreed);
  // Copies pages [first, first + pages.size()) of the lease's request from this rank's device pages to the
  // pool. All ranks of the group post the same range. Ends for all ranks when every page is published or
  // given up. `states`, for a namespace with trailing pools: for each page the slot with the states that
  // belong to its end, or none; empty = none at all. All ranks give states of the same pages.
  Result<Ticket> write(LeaseId lease, std::uint32_t first, std::span<const DevicePage> pages,
                       std::optional<WriteFence> fence = std::nullopt, std::uint32_t deadline_ms = 0,
                       std::span<const DevicePage> states = {});
  // Copies ready pages of the lease to this rank's device pages. Independent of the other ranks. `states`:
  // the slots to which the states of these pages are copied too, mostly just the last one's; not_found for a
  // page without states.
  Result<Ticket> load(LeaseId lease, std::uint32_t first, std::span<const DevicePage> pages,
                      std::optional<LayerFence> fence = std::nullopt, std::uint32_t deadline_ms = 0,
                      std::span<const DevicePage> states = {});
  // This rank needs the lease no more. The request counts as used once all ranks have released.
  Result<Ticket> release(LeaseId lease, std::uint32_t deadline_ms = 0);
  // How far the group's sequences have ended on all ranks. Agreements are numbered from 1; the first rank
  // that asks for one decides it, the others get the same answer whenever they ask, and nobody waits for
  // anybody. The answer never passes a sequence with a failed load in one step: that one is its last.
  // Ends with again when this rank is kAgreementWindow agreements ahead of another.
  Result<Ticket> agree(std::uint64_t number, std::uint32_t deadline_ms = 0);

  // Fetches pages [first, first + count) of the lease's request from storage, as many leading ones as it has
  // and policy and limits allow. The group decides once; all ranks that want the result post the same range,
  // one a lease. Pages become ready one by one in prefix order, pinned by the lease, and can be loaded (and
  // found by probe) before the operation has ended. It ends when no further page will come; the leading
  // present + written pages of the range are ready then. Without storage it ends at once with none.
  Result<Ticket> prefetch(LeaseId lease, std::uint32_t first, std::uint32_t count,
                          std::optional<PrefetchPolicy> policy = std::nullopt, std::uint32_t deadline_ms = 0);
  // May the request go on? Under best_effort the answer is yes, and ends the prefetch. `number` counts the
  // questions about this prefetch from 1; every rank gets the same answer to the same one. filling > 0: not
  // yet. Otherwise the result is the prefetch's.
  Result<Ticket> check_prefetch(LeaseId lease, std::uint32_t number, std::uint32_t deadline_ms = 0);
  // As check_prefetch, and the answer is yes: what has not come by now is given up.
  Result<Ticket> end_prefetch(LeaseId lease, std::uint32_t number, std::uint32_t deadline_ms = 0);

  // The acknowledgement of a backup: ends, once, when for each page [first, first + count) of the lease's
  // request it is known whether storage holds it (`written`) or not (`dropped`). Pages that are still being
  // filled are waited for; those that are ready, not in storage and not on their way there are queued, unless
  // the daemon's backup policy is none. All ranks that ask for the same range get the same answer. The lease
  // may be released meanwhile: nothing of the group waits for storage. Ends with again when more is asked
  // than the daemon keeps track of, and with timed_out while storage is silent.
  Result<Ticket> backup(LeaseId lease, std::uint32_t first, std::uint32_t count,
                        std::uint32_t deadline_ms = 0);

  // Next completion if there is one. After the daemon was lost: every operation still open ends once with
  // daemon_lost (with pages_busy, and pages_returned once its copies are proved over, where they may still
  // run), then nothing. When the daemon is stopped or hung, operations end with timed_out a quarter second
  // after their deadline.
  std::optional<OperationResult> poll();
  // Waits for the next event of a ticket (keeping others for poll) at most timeout_ms. timed_out leaves the
  // operation open; not_found: no such operation, or its result was read already.
  Result<OperationResult> wait(Ticket ticket, std::uint32_t timeout_ms);
  // Waits for any completion, at most timeout_ms.
  Result<OperationResult> wait_any(std::uint32_t timeout_ms);

  // Stores a write fence's value (host side). Values only grow.
  void raise_write_fence(std::uint32_t index, std::uint32_t value);
  // True when `layer` of the load that uses `fence` was announced. A failed load releases its layers too, so
  // that nobody hangs: its result tells.
  [[nodiscard]] bool layer_ready(const LayerFence& fence, std::uint32_t layer) const;
  // Waits for it. A wait that ends because the load failed returns its status: a released wait means failed.
  Outcome wait_layer(const LayerFence& fence, std::uint32_t layer, std::uint32_t timeout_ms);

  // The same fences in CUDA streams (`stream` is a CUstream or cudaStream_t, null for the default one; its
  // context must be current, or the stream not null). not_found: CUDA is off, with the reason.
  //
  // Work put into the stream later runs when `layer` has landed, or the load has failed: ask load_result
  // before its output is used. The load must have been posted. A dead daemon never keeps the stream waiting:
  // a thread of the session releases it.
  Outcome stream_wait_layer(void* stream, const LayerFence& fence, std::uint32_t layer);
  // Raises a write fence when the work before it in the stream is done. Values of an index only grow.
  Outcome stream_raise_write_fence(void* stream, std::uint32_t index, std::uint32_t value);
  // How the load that uses `fence` ended: ok when every layer has landed, else its status. Waits for the end
  // at most timeout_ms.
  Outcome load_result(const LayerFence& fence, std::uint32_t timeout_ms);

  // Tells people who look at the region (hicache-dump) how many host pages of this rank's controller are in
  // which state, which changed last, and what was refused. The daemon reads it at the next agreement.
  void report_host_pages(const HostPageCounts& counts);

  // ok, or why the session has ended. Cheap; looks at the socket at most every few milliseconds.
  [[nodiscard]] Status state() const;
  // Ends the session. Open operations end with `closed`.
  void close();

  [[nodiscard]] NamespaceId namespace_id() const;
  [[nodiscard]] std::uint32_t tp_rank() const;
  [[nodiscard]] std::uint32_t tp_size() const;
  [[nodiscard]] std::uint64_t instance_epoch() const;
  [[nodiscard]] std::uint32_t client_slot() const;
  [[nodiscard]] SessionCounters counters() const;

 private:
  struct Impl;
  friend class StreamFences;
  friend Outcome register_cuda_buffers(Session&, std::span<const CudaRange>, std::span<const DeviceTensor>,
                                       std::uint32_t, std::uint32_t, std::uint32_t);
  class Reattachment;
  // The session as it is now. With `reattach` it may be replaced while other threads still use the one
  // before, which therefore lives as long as the session.
  class HICACHE_EXPORT Current {
   public:
    explicit Current(std::unique_ptr<Impl> impl);
    ~Current();
    Impl& operator*() const { return *now_.load(std::memory_order_acquire); }
    Impl* operator->() const { return now_.load(std::memory_order_acquire); }
    [[nodiscard]] bool valid() const { return now_.load(std::memory_order_relaxed) != nullptr; }
    // Ends the threads that serve CUDA streams, in every life.
    void end_stream_fences();

   private:
    friend class Reattachment;
    std::atomic<Impl*> now_;  // release in Reattachment::switch_over
    std::vector<std::unique_ptr<Impl>> lives_;
  };

  explicit Session(std::unique_ptr<Impl> impl);
  Result<Ticket> ask_about_prefetch(Opcode opcode, LeaseId lease, std::uint32_t number,
                                    std::uint32_t deadline_ms);
  // register_buffers; `ranges` are the allocations in this process where they are GPU memory.
  Outcome register_memory(const DeviceGeometry& geometry, std::span<const int> fds,
                          std::span<const CudaRange> ranges, std::uint32_t timeout_ms);
  // Looks at the daemon; true while a load with layer fences is open.
  bool look_after_loads();
  void follow_daemon() const;
  mutable Current impl_;
  std::unique_ptr<Reattachment> reattachment_;
};

// Asks a daemon for something over its socket (what hicache-ctl does). The answer is JSON text.
HICACHE_EXPORT Result<std::string> control(const std::string& socket_path,
                                           const std::vector<std::string>& arguments,
                                           std::uint32_t timeout_ms = 10'000);

}  // namespace hicache
