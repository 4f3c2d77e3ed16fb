// The inside of a Session. Its methods are spread over session_post.cpp (submissions), session_events.cpp
// (completions and the end of a session) and session_wait.cpp (sleeping).
//
// Locking: everything below "guarded" is touched only under `mutex`. The atomics are hints that let a poll
// without news return without the mutex; whoever acts on one takes the mutex and looks again.
#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "arena.hpp"
#include "daemon_watch.hpp"
#include "fork_guard.hpp"
#include "hicache/client.hpp"
#include "kernel/kernel_worker.hpp"
#include "layer_loads.hpp"
#include "operation_table.hpp"
#include "shm/channel_layout.hpp"
#include "shm/clock.hpp"
#include "shm/fd.hpp"
#include "shm/messages.hpp"
#include "shm/region.hpp"
#include "shm/ring.hpp"
#include "shm/shared_memory.hpp"
#include "shm/tripwire.hpp"
#include "shm/waiting.hpp"
#include "staging/staging.hpp"
#include "stream_fences.hpp"

namespace hicache {

// A few nanoseconds instead of twenty, and milliseconds coarse: good enough for "is it time to look at the
// daemon".
inline std::uint64_t coarse_ns() {
  return clock_ns(CLOCK_MONOTONIC_COARSE);
}

// What a rank in io_backend kernel gets besides.
struct KernelAttachment {
  Mapping pool;
  Mapping block;
  UniqueFd news;  // the daemon's eventfd for ends
};

// What a successful attach leaves behind. Everything in it has been checked.
struct Attachment {
  Welcome welcome;
  UniqueFd socket;
  UniqueFd kick;
  Mapping control;
  Mapping channel;
  ConstTables tables;
  std::optional<KernelAttachment> kernel;
};

struct HICACHE_LOCAL Session::Impl {
  Impl(const AttachOptions& options, Attachment attachment);
  ~Impl();

  // How often the socket and the daemon's process are looked at while nothing else happens.
  static constexpr std::uint64_t kLookEveryNs = 2'000'000;
  // The daemon ends operations at their deadlines; when it is stopped or hung, the client does, this much
  // later.
  static constexpr std::uint64_t kDeadlineGraceNs = 250'000'000;

  // --- session_post.cpp
  // Fills in what all submissions share, copies `lists` into the arena, leaves `result_bytes` behind them,
  // publishes the entry, and wakes the coordinator when it sleeps.
  Result<Ticket> post(Submission& submission, std::span<const std::uint8_t> lists,
                      std::uint64_t result_bytes);
  Result<Ticket> post_locked(Submission& submission, std::span<const std::uint8_t> lists,
                             std::uint64_t result_bytes);
  Outcome check_pages(std::span<const DevicePage> pages) const;
  // not_permitted, with the user's id, where the daemon lets this user only read.
  Outcome may_change(const char* what) const;
  Outcome check_states(std::span<const DevicePage> pages, std::span<const DevicePage> states) const;
  [[nodiscard]] Error end_error() const;

  // --- session_events.cpp
  // True when a completion lies in the ring. No lock.
  [[nodiscard]] bool ring_news() const {
    const std::uint32_t head = cq_head_hint.load(std::memory_order_relaxed);
    return cq_entries[head & cq_mask].sequence.load(std::memory_order_acquire) ==
           head + 1;  // SYNC ring-publish
  }
  // True when poll may have something to hand out. No lock.
  [[nodiscard]] bool news() const { return ring_news() || events_hint.load(std::memory_order_relaxed) != 0; }
  [[nodiscard]] bool ended() const { return end_reason.load(std::memory_order_acquire) != Status::ok; }
  // True when it is time to look at the daemon again.
  [[nodiscard]] bool look_due() const;
  std::optional<OperationResult> next_event();
  OperationResult deliver(Operation& operation);
  // Takes a completion. The operation that has an event now, or nullptr.
  Operation* accept(const Completion& completion);
  // Wakes the coordinator when it sleeps.
  void kick_sleeping_daemon();
  // After completions were read: a coordinator that found no room for more left submissions unserved and may
  // sleep.
  void kick_stalled_daemon(std::uint32_t operations_before);
  // Moves all completions from the ring into the table.
  void pump();
  // Brings the hints up to date; every change of the ring's head or the event queue ends with it.
  void publish_hints();
  // Looks whether the daemon lives, ends overdue operations, and proves copies over. Calls pump.
  void look_at_daemon();
  // Ends the session: every open operation gets its result. The first reason stays.
  void end(Status reason, const std::string& text);

  // True when the daemon's tripwire has fired. No lock.
  [[nodiscard]] bool daemon_died() const {
    return tripwire_fired(header->daemon_tripwire.load(std::memory_order_relaxed));
  }
  // Continues a lost session's numbers in this one: tickets stay unique and fences never move back. Nobody
  // else uses either yet, and every result of the lost one has been read.
  void continue_from(Impl& lost);

  // --- session_wait.cpp
  // Sleeps until a completion comes, another thread changes something, or the deadline. The caller has looked
  // at the table under the mutex. `idle` carries over between the calls of one wait: its last sleep was in
  // vain.
  void sleep_for_news(std::unique_lock<std::mutex>& lock, std::uint64_t deadline_ns, bool& idle);
  void park(std::unique_lock<std::mutex>& lock, std::uint64_t deadline_ns, bool& idle);
  // Tells the other sleepers of this session to look at the table again. Under the mutex.
  void wake_sleepers();
  // How the load of a released fence ended; nothing while it is not known.
  std::optional<Status> load_status(const LayerFence& fence);

  // --- attach.cpp
  // The thread that moves the pages of these buffers, where io_backend is kernel.
  Result<std::unique_ptr<KernelWorker>> make_kernel_worker(const DeviceGeometry& geometry,
                                                           std::span<const int> fds,
                                                           std::span<const CudaRange> ranges);

  // --- session.cpp
  // Staging memory for GPU buffers, or nullptr: not wanted by either side, or not possible here.
  [[nodiscard]] std::unique_ptr<Staging> make_staging(const DeviceGeometry& geometry,
                                                      std::span<const CudaRange> ranges) const;
  // Lets the staging memory be freed once the daemon can't touch it; waits for that at most `longest_ns`.
  void settle_staging(std::uint64_t longest_ns);

  // --- session_streams.cpp
  // The fence words as streams see them; made at the first use. Under the mutex.
  Result<StreamFences*> streams_locked(Session& session, void* stream);

  // --- immutable after attach
  const ForkGuard fork;
  const Role role;
  const std::uint32_t tp_rank;
  const NamespaceSpec spec;
  const bool has_states;
  Attachment attached;
  DaemonWatch watch;
  ChannelHeader* const header;
  const RingEntry* const cq_entries;
  const std::uint32_t cq_mask;
  FenceBlock* const fences;
  std::uint8_t* const arena_base;
  const WaitPolicy waiting;
  const IndexReader index;
  const std::uint64_t staging_bytes;

  // --- hints, see above
  std::atomic<std::uint32_t> cq_head_hint{0};
  std::atomic<std::uint32_t> events_hint{0};
  std::atomic<Status> end_reason{Status::ok};  // stored last (release) when the session ends
  std::atomic<std::uint64_t> last_look_ns{0};
  mutable std::atomic<std::uint32_t> idle_polls{0};
  mutable std::atomic<std::uint32_t> namespace_now;  // follows bumps
  std::atomic<std::uint32_t> device_pages{0};        // of the registered geometry, 0 before
  std::atomic<std::uint32_t> device_states{0};       // the same

  // --- registration: one at a time, never under `mutex`
  std::mutex registration_mutex;
  std::atomic<bool> exported_memory{false};  // GPU memory was offered to the daemon
  enum class Registration { none, unanswered, done } registration = Registration::none;

  // --- guarded
  mutable std::mutex mutex;
  RingProducer<Submission> sq;
  RingConsumer<Completion> cq;
  OperationTable operations;
  Arena arena;
  LayerLoads layer_loads[kProducerSlots];
  std::string end_text;
  std::uint64_t earliest_expiry_ns = ~0ull;
  std::vector<std::uint64_t>
      orphan_leases;                      // of reserves that were decided after the client had given them up
  bool someone_parked = false;            // one thread sleeps on the channel's word for all others
  std::uint32_t followers = 0;            // the others; they sleep on `changes`
  std::atomic<std::uint32_t> changes{0};  // futex word, grows whenever a follower may have something to do
  std::atomic<std::uint32_t> end_signal{0};  // futex word, 1 once the session has ended
  SessionCounters counters;
  std::unique_ptr<Staging> staging;      // set once, at registration
  std::unique_ptr<KernelWorker> kernel;  // the same
  // let_go: the daemon closed the connection, and device memory before it; shut: this side closed it.
  enum class Closing { open, let_go, shut } closing = Closing::open;
  std::unique_ptr<StreamFences> stream_fences;     // nullptr until a stream uses a fence
  std::uint32_t stream_raised[kWriteFences] = {};  // highest value that a stream was told to write

 private:
  // Holds this side's tripwire and looks at the daemon whenever its side changes: waits end even where every
  // thread of the engine sleeps in them.
  void guard();
  void expire_overdue(std::uint64_t now_ns);
  void prove_copies_over();
  void release_orphans();
  void release_fence_as_failed(const Operation& operation);
  [[nodiscard]] bool plausible(const Operation& operation, const Completion& completion) const;
  // Queues what is pending, or frees the operation when nothing is and nothing will be.
  void settle(Operation& operation);

  TripwireStop guard_stop;
  std::thread guardian;
};

}  // namespace hicache
