// The inside of GpuTransfers: its transfer thread's state. Methods are spread over gpu_transfers.cpp (the
// thread, and jobs that wait), gpu_lanes.cpp (chunks on streams) and gpu_ends.cpp (checksums, and how jobs
// are reported).
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/cuda/gpu_memory.hpp"
#include "daemon/cuda/gpu_transfers.hpp"
#include "daemon/cuda/page_checksums.hpp"
#include "daemon/transfer/doorbell.hpp"
#include "daemon/transfer/job_queues.hpp"

namespace hicache::daemon {

// Which jobs to end, and how.
struct Cancellation {
  Status status = Status::timed_out;
  TransferId id;  // or, when 0, everything of a client
  ClientSlot client;
  Generation generation;

  [[nodiscard]] bool fits(const TransferJob& job) const {
    if (id.value != 0) return job.transfer.id == id;
    return job.transfer.memory->client == client && job.transfer.memory->client_generation == generation;
  }
};

struct GpuTransfers::Impl {
  Impl(std::shared_ptr<Gpu> g, const GpuPool& p, const PoolPinner& pin, ExchangeTable& e, TransferSink s,
       const ShardChecksums* sums, std::uint32_t threads)
      : gpu(std::move(g)), pool(p), pinner(pin), exchanges(e), sink(std::move(s)) {
    if (sums != nullptr && sums->recording()) checksums.emplace(*sums, threads);
  }

  void thread_body();
  bool take_in();
  bool take_cancellations();
  bool poll_parked(std::uint64_t now);
  [[nodiscard]] bool slot_in_use(const GpuJob& job, std::size_t parked_before) const;
  bool gathered(GpuJob& job, std::size_t parked_before, std::uint64_t now);
  [[nodiscard]] std::optional<Status> ready_to_run(GpuJob& job, std::uint64_t now) const;
  void into_lane(GpuJobPtr job);
  bool reap(GpuLane& lane);
  bool move(GpuLane& lane);
  bool feed(GpuLane& lane, std::uint64_t now);
  bool feed_staged(GpuLane& lane, GpuJob& job);
  [[nodiscard]] bool has_room(const GpuLane& lane, const GpuJob& job) const;
  void put_in_flight(GpuLane& lane, GpuChunk chunk);
  CUstream pass_on(GpuJob& job, GpuChunk& chunk);
  void announce(const GpuLane& lane, const GpuChunk& chunk);
  bool turn(std::uint64_t now);
  void finish(GpuJobPtr job);
  void finish_part(GpuJobPtr job);
  void report(GpuJob& job);
  void begin_comparing(GpuJob& job);
  [[nodiscard]] bool still_comparing(GpuJob& job) const;
  void end_all(const Cancellation* only, Status status);
  void break_down(CUresult result, const char* what);
  void rest(std::uint64_t now);
  CUevent take_event();

  const std::shared_ptr<Gpu> gpu;
  const GpuPool pool;
  const PoolPinner& pinner;
  ExchangeTable& exchanges;
  const TransferSink sink;
  GpuCounters counters;
  std::optional<PageChecksums> checksums;  // its threads call the sink: they end after this thread

  JobInbox inbox;
  // Shared with exchanges, which outlive the GPU that leaves first.
  const std::shared_ptr<Doorbell> bell = std::make_shared<Doorbell>();
  std::atomic<bool> stopping{false};  // release in the destructor, acquire in the thread
  std::mutex mutex;
  std::vector<Cancellation> cancellations;     // guarded by mutex
  std::atomic<bool> has_cancellations{false};  // set under the mutex; tells the thread to look

  // The thread's own.
  struct ActiveLane {
    GpuLane* lane;
    std::shared_ptr<const RankMemory> memory;  // keeps the lane: its last job may be gone before the list is
  };
  std::vector<GpuJobPtr> parked;  // wait for their fence or for pinning
  std::vector<ActiveLane> active;
  std::vector<CUevent> spare_events;
  CUevent handover = nullptr;  // between this GPU's streams
  std::uint64_t last_work_ns = 0;
  std::uint64_t give_up_ns = 0;  // when a stopping daemon stops to wait for ranks; 0 = it is not stopping

  std::thread thread;
};

}  // namespace hicache::daemon
