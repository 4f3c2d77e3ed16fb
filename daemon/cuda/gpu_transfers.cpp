#include "daemon/cuda/gpu_transfers.hpp"

#include <spdlog/spdlog.h>
#include <sys/prctl.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/cuda/gpu_memory.hpp"
#include "daemon/transfer/doorbell.hpp"
#include "daemon/transfer/job_queues.hpp"
#include "daemon/transfer/layer_fences.hpp"
#include "shm/clock.hpp"
#include "shm/waiting.hpp"

namespace hicache::daemon {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;
// Chunks of a lane on each of its streams: enough that the copy engine never waits for this thread, few
// enough that a rank gets its turn soon.
constexpr std::size_t kChunksPerStream = 4;
// After work the thread looks again at once for this long, then in growing pauses within these bounds.
constexpr std::uint64_t kAlertNs = 200'000;
constexpr std::uint64_t kMinPauseNs = 20'000;
constexpr std::uint64_t kMaxPauseCopyingNs = 50'000;
constexpr std::uint64_t kMaxPauseWaitingNs = 1'000'000;
constexpr std::uint64_t kIdlePauseNs = 1'000'000'000;
constexpr unsigned long kTimerSlackNs = 1'000;

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

}  // namespace

struct GpuTransfers::Impl {
  Impl(std::shared_ptr<Gpu> g, const GpuPool& p, const PoolPinner& pin, ExchangeTable& e, TransferSink s)
      : gpu(std::move(g)), pool(p), pinner(pin), exchanges(e), sink(std::move(s)) {}

  void thread_body();
  bool take_in();
  bool take_cancellations();
  bool poll_parked(std::uint64_t now);
  [[nodiscard]] bool slot_in_use(const GpuJob& job, std::size_t parked_before) const;
  bool gathered(GpuJob& job, std::size_t parked_before, std::uint64_t now);
  [[nodiscard]] std::optional<Status> ready_to_run(GpuJob& job, std::uint64_t now) const;
  void into_lane(GpuJobPtr job);
  bool reap(GpuLane& lane);
  bool feed(GpuLane& lane, std::uint64_t now);
  CUstream pass_on(GpuJob& job, GpuChunk& chunk);
  void announce(const GpuLane& lane, const GpuChunk& chunk);
  bool turn(std::uint64_t now);
  void finish(GpuJobPtr job);
  void finish_part(GpuJobPtr job);
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

  std::thread thread;
};

// Ok: may start. Another status: how it ends. Nothing: not yet.
std::optional<Status> GpuTransfers::Impl::ready_to_run(GpuJob& job, std::uint64_t now) const {
  TransferJob& base = job.base();
  if (base.verdict != Status::ok) return base.verdict;
  if (job.is_part() && job.exchange()->verdict() != Status::ok) return job.exchange()->verdict();
  const bool pinned = job.pool_end() <= pinner.pinned_bytes();  // SYNC pinned
  if (pinned && base.may_start()) return Status::ok;
  if (base.expired(now)) return Status::timed_out;
  if (!pinned && pinner.failed()) return Status::no_space;
  return std::nullopt;
}

bool GpuTransfers::Impl::take_in() {
  JobList jobs = inbox.take_all();
  bool any = false;
  while (TransferJobPtr job = jobs.pop_front()) {
    any = true;
    parked.push_back(std::make_unique<GpuJob>(std::move(job)));
    GpuJob& added = *parked.back();
    if (added.base().verdict == Status::ok && exchanges.wants(added.base().transfer)) added.want_group();
  }
  return any;
}

// Whether an earlier load that announces its layers at the same producer slot has not got so far that this
// one may follow: a word that this one raises would release who waits for the earlier one.
bool GpuTransfers::Impl::slot_in_use(const GpuJob& job, std::size_t parked_before) const {
  const TransferJob& base = job.base();
  if (!base.announces_layers()) return false;
  if (base.transfer.memory->device->exchanging[base.transfer.fence].load(std::memory_order_acquire))
    return true;
  for (std::size_t i = 0; i < parked_before; ++i) {
    const TransferJob& earlier = parked[i]->base();
    if (earlier.announces_layers() && earlier.transfer.memory == base.transfer.memory &&
        earlier.transfer.fence == base.transfer.fence)
      return true;
  }
  return false;
}

// Whether the job may leave the parked ones as far as its producer slot and its group are concerned.
bool GpuTransfers::Impl::gathered(GpuJob& job, std::size_t parked_before, std::uint64_t now) {
  if (job.is_part()) return true;
  const Transfer& transfer = job.base().transfer;
  const bool over = job.base().verdict != Status::ok || job.base().expired(now);
  if (job.exchange() == nullptr) {
    if (slot_in_use(job, parked_before)) return false;
    if (over || !job.wants_group()) return true;
    auto exchange = exchanges.join(transfer, bell);
    if (exchange == nullptr) return job.go_direct(), true;
    job.gather(std::move(exchange), now + exchanges.patience_ns(transfer));
  }
  Exchange& exchange = *job.exchange();
  if (exchange.state() == Exchange::State::gathering) {
    if (!over && now < job.gather_until_ns()) return false;
    exchanges.give_up(exchange, over ? GoDirect::ended : GoDirect::late);
  }
  if (exchange.state() == Exchange::State::agreed) {
    job.take_part();
  } else {
    ExchangeTable::leave(transfer);
    job.go_direct();
  }
  return true;
}

bool GpuTransfers::Impl::poll_parked(std::uint64_t now) {
  bool any = false;
  std::size_t kept = 0;
  for (GpuJobPtr& job : parked) {
    const auto status = gathered(*job, kept, now) ? ready_to_run(*job, now) : std::nullopt;
    if (status) {
      job->base().verdict = *status;
      into_lane(std::move(job));
      any = true;
    } else {
      std::swap(parked[kept++], job);
    }
  }
  parked.resize(kept);
  return any;
}

// Jobs that end without a copy go there too: their words must not be raised before older ones of the stream.
void GpuTransfers::Impl::into_lane(GpuJobPtr job) {
  const Transfer& transfer = job->base().transfer;
  GpuLane& lane = job->memory().lane(transfer.direction);
  if (!lane.active) {
    lane.active = true;
    active.push_back(ActiveLane{&lane, transfer.memory});
  }
  lane.queue.push_back(std::move(job));
}

void GpuTransfers::Impl::finish(GpuJobPtr job) {
  if (job->is_part()) return finish_part(std::move(job));
  const Direction direction = job->base().transfer.direction;
  const TransferDone done = job->base().finish(TransferOptions{});
  counters.transfers.fetch_add(1, kRelaxed);
  if (done.status != Status::ok) counters.failed.fetch_add(1, kRelaxed);
  (direction == Direction::load ? counters.bytes_loaded : counters.bytes_written)
      .fetch_add(done.bytes, kRelaxed);
  sink(done);
}

// The load has ended when all ranks' parts have: the last one reports it for all.
void GpuTransfers::Impl::finish_part(GpuJobPtr job) {
  counters.transfers.fetch_add(1, kRelaxed);
  if (job->base().verdict != Status::ok) counters.failed.fetch_add(1, kRelaxed);
  counters.bytes_loaded.fetch_add(job->base().bytes, kRelaxed);
  const std::uint32_t rank = job->base().transfer.group->rank;
  const auto ended = job->exchange()->part_ended(rank, job->release_base());
  if (!ended.empty()) exchanges.count_end(ended.front().status);
  job.reset();
  for (const TransferDone& done : ended) sink(done);
}

CUevent GpuTransfers::Impl::take_event() {
  if (!spare_events.empty()) {
    const CUevent event = spare_events.back();
    spare_events.pop_back();
    return event;
  }
  CUevent event = nullptr;
  if (const CUresult r = gpu->driver().cuEventCreate(&event, CU_EVENT_DISABLE_TIMING); r != CUDA_SUCCESS) {
    break_down(r, "cuEventCreate");
    return nullptr;
  }
  return event;
}

// An error of the context: no copy of it runs any more, and none will.
void GpuTransfers::Impl::break_down(CUresult result, const char* what) {
  if (counters.broken.exchange(true, kRelaxed)) return;
  spdlog::error("{}: every transfer of this GPU fails until the daemon is restarted",
                cuda_error(gpu->driver(), result, uuid_text(gpu->device().uuid) + ": " + what).message);
}

bool GpuTransfers::Impl::reap(GpuLane& lane) {
  bool any = false;
  while (!lane.in_flight.empty()) {
    GpuChunk& chunk = lane.in_flight.front();
    TransferJob& base = chunk.job->base();
    if (chunk.event != nullptr && !counters.broken.load(kRelaxed)) {
      const CUresult r = gpu->driver().cuEventQuery(chunk.event);
      if (r == CUDA_ERROR_NOT_READY) break;
      if (r != CUDA_SUCCESS) break_down(r, "a copy failed");
    }
    if (counters.broken.load(kRelaxed)) {
      if (base.verdict == Status::ok) base.verdict = Status::system_error;
    } else {
      base.bytes += chunk.work.bytes;
    }
    if (chunk.event != nullptr) spare_events.push_back(chunk.event);
    if (chunk.job->is_part()) {
      if (chunk.work.end_layer > 0 && base.verdict == Status::ok)
        chunk.job->exchange()->landed(base.transfer.group->rank, chunk.work.end_layer);
    } else if (LayerFences* fences = chunk.job->layer_fences();
               fences != nullptr && base.verdict == Status::ok) {
      // The stream has raised the words already, unless it cannot.
      const bool by_cpu = chunk.job->memory().fence_address(fences->layer[0]) == 0;
      for (std::uint32_t l = chunk.work.first_layer; by_cpu && l < chunk.work.end_layer; ++l) {
        raise_layer_word(fences->layer[l], base.transfer.fence_value);
      }
      if (chunk.work.end_layer > 0) wake_layer_waiters(*fences);
    }
    GpuJobPtr ended = std::move(chunk.owner);
    lane.in_flight.pop_front();
    if (ended != nullptr) finish(std::move(ended));
    any = true;
  }
  return any;
}

// Layers become complete in order, and words only grow: a word waits for everything that the lane's streams
// hold.
void GpuTransfers::Impl::announce(const GpuLane& lane, const GpuChunk& chunk) {
  for (const GpuChunk& other : lane.in_flight) {
    if (other.stream == chunk.stream) continue;
    if (const CUresult r = gpu->driver().cuStreamWaitEvent(chunk.stream, other.event, CU_EVENT_WAIT_DEFAULT);
        r != CUDA_SUCCESS) {
      return break_down(r, "cuStreamWaitEvent");
    }
  }
  chunk.job->announce(chunk.work, chunk.stream);
}

// Puts what the chunk has brought for other GPUs on their streams. Returns the stream behind whose work the
// chunk has ended.
CUstream GpuTransfers::Impl::pass_on(GpuJob& job, GpuChunk& chunk) {
  PassOn* passing = job.pass_on();
  if (passing == nullptr || !passing->pending() || job.base().verdict != Status::ok) return chunk.stream;
  const PassOn::Put put = passing->put(chunk.stream, handover);
  chunk.work.copies += put.copies;
  counters.bytes_passed.fetch_add(put.bytes, kRelaxed);
  if (put.last == nullptr) {
    break_down(put.result, put.what);
    return chunk.stream;
  }
  if (put.result != CUDA_SUCCESS) job.fail(put.result, put.what);
  return put.last;
}

// Puts one chunk more on one of the lane's streams, or ends jobs at its head that have a verdict.
bool GpuTransfers::Impl::feed(GpuLane& lane, std::uint64_t now) {
  bool any = false;
  while (!lane.queue.empty()) {
    GpuJob& job = *lane.queue.front();
    TransferJob& base = job.base();
    if (base.verdict == Status::ok && counters.broken.load(kRelaxed)) base.verdict = Status::system_error;
    if (base.verdict == Status::ok && base.expired(now)) base.verdict = Status::timed_out;
    if (job.is_part()) {
      if (base.verdict == Status::ok) base.verdict = job.exchange()->verdict();
      if (base.verdict != Status::ok) job.exchange()->fail(base.verdict);
    }
    if (base.verdict != Status::ok) {
      // Its own chunks must have ended, and a stream's late word must not move back what the CPU raises.
      if (!lane.in_flight.empty()) return any;
      GpuJobPtr ended = std::move(lane.queue.front());
      lane.queue.pop_front();
      finish(std::move(ended));
      any = true;
      continue;
    }
    if (lane.in_flight.size() >= kChunksPerStream * lane.streams.size()) return any;
    GpuChunk chunk;
    chunk.event = take_event();
    if (chunk.event == nullptr) continue;  // broken down
    chunk.job = &job;
    chunk.stream = lane.streams[lane.next_stream];
    lane.next_stream = (lane.next_stream + 1) % lane.streams.size();
    chunk.work = job.enqueue(pool, chunk.stream);
    const CUstream last = pass_on(job, chunk);
    counters.copies.fetch_add(chunk.work.copies, kRelaxed);
    if (chunk.work.end_layer > 0 && base.verdict == Status::ok && !job.is_part()) announce(lane, chunk);
    if (const CUresult r = gpu->driver().cuEventRecord(chunk.event, last); r != CUDA_SUCCESS) {
      break_down(r, "cuEventRecord");
    }
    if (base.verdict == Status::ok && job.all_enqueued()) {
      chunk.owner = std::move(lane.queue.front());
      lane.queue.pop_front();
    }
    lane.in_flight.push_back(std::move(chunk));
    return true;
  }
  return any;
}

// One look at every lane, each turn beginning with another one.
bool GpuTransfers::Impl::turn(std::uint64_t now) {
  bool any = false;
  for (ActiveLane& entry : active) {
    any |= reap(*entry.lane);
    any |= feed(*entry.lane, now);
  }
  std::erase_if(active, [](ActiveLane& entry) {
    if (!entry.lane->queue.empty() || !entry.lane->in_flight.empty()) return false;
    entry.lane->active = false;
    return true;
  });
  if (active.size() > 1) std::rotate(active.begin(), active.begin() + 1, active.end());
  return any;
}

// Gives a verdict to every job that fits and is not wholly on its stream.
void GpuTransfers::Impl::end_all(const Cancellation* only, Status status) {
  const auto end = [&](GpuJob& job) {
    TransferJob& base = job.base();
    // The others of the group need what a dead rank's part brings, and its memory stays until it has ended.
    if (only != nullptr && only->id.value == 0 && job.is_part()) return;
    if (base.verdict == Status::ok && (only == nullptr || only->fits(base))) base.verdict = status;
  };
  for (const GpuJobPtr& job : parked) end(*job);
  for (const ActiveLane& entry : active) {
    for (const GpuJobPtr& job : entry.lane->queue) end(*job);
  }
}

bool GpuTransfers::Impl::take_cancellations() {
  if (!has_cancellations.load(std::memory_order_acquire)) return false;
  std::vector<Cancellation> taken;
  {
    const std::lock_guard lock(mutex);
    taken.swap(cancellations);
    has_cancellations.store(false, kRelaxed);
  }
  take_in();  // what a cancellation is about was submitted before it
  for (const Cancellation& c : taken) end_all(&c, c.status);
  return true;
}

void GpuTransfers::Impl::rest(std::uint64_t now) {
  const std::uint64_t quiet = now - last_work_ns;
  if (quiet < kAlertNs) {
    ::sched_yield();
    return;
  }
  std::uint64_t pause = kIdlePauseNs;
  if (!active.empty()) {
    pause = std::clamp(quiet / 8, kMinPauseNs, kMaxPauseCopyingNs);
  } else if (!parked.empty()) {
    pause = std::clamp(quiet / 8, kMinPauseNs, kMaxPauseWaitingNs);
  }
  const std::uint32_t key = bell->lie_down();
  if (inbox.empty() && !has_cancellations.load(std::memory_order_acquire) &&
      !stopping.load(std::memory_order_acquire)) {
    bell->sleep(key, pause);
  }
  bell->get_up();
}

void GpuTransfers::Impl::thread_body() {
  ::prctl(PR_SET_TIMERSLACK, kTimerSlackNs, 0, 0, 0);
  if (auto used = gpu->use(); !used) {
    spdlog::error("{}: every transfer of this GPU fails", used.error().message);
    counters.broken.store(true, kRelaxed);
  }
  handover = take_event();
  for (;;) {
    bool worked = take_in();
    worked |= take_cancellations();
    const bool stop = stopping.load(std::memory_order_acquire);
    if (stop) end_all(nullptr, Status::shutting_down);
    const std::uint64_t now = monotonic_ns();
    worked |= poll_parked(now);
    worked |= turn(now);
    if (stop && inbox.empty() && parked.empty() && active.empty()) break;
    if (worked) {
      last_work_ns = now;
    } else {
      rest(now);
    }
  }
  if (handover != nullptr) spare_events.push_back(handover);
  for (const CUevent event : spare_events) gpu->driver().cuEventDestroy(event);
}

GpuTransfers::GpuTransfers(std::shared_ptr<Gpu> gpu, const GpuPool& pool, const PoolPinner& pinner,
                           ExchangeTable& exchanges, TransferSink sink)
    : impl_(std::make_unique<Impl>(std::move(gpu), pool, pinner, exchanges, std::move(sink))) {
  impl_->thread = std::thread([impl = impl_.get()] { impl->thread_body(); });
}

GpuTransfers::~GpuTransfers() {
  impl_->stopping.store(true, std::memory_order_release);
  impl_->bell->ring_all();
  impl_->thread.join();
}

void GpuTransfers::submit(Transfer transfer) {
  auto job = std::make_unique<TransferJob>(std::move(transfer));
  job->admit();
  impl_->inbox.push(std::move(job));
  impl_->bell->ring();
}

void GpuTransfers::cancel(TransferId id) {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->cancellations.push_back(Cancellation{Status::timed_out, id, {}, {}});
    impl_->has_cancellations.store(true, std::memory_order_release);  // pairs with the thread's acquire
  }
  impl_->bell->ring();
}

void GpuTransfers::cancel_client(ClientSlot client, Generation generation) {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->cancellations.push_back(Cancellation{Status::peer_lost, TransferId{}, client, generation});
    impl_->has_cancellations.store(true, std::memory_order_release);  // pairs with the thread's acquire
  }
  impl_->bell->ring();
}

const std::shared_ptr<Gpu>& GpuTransfers::gpu() const {
  return impl_->gpu;
}

const GpuCounters& GpuTransfers::counters() const {
  return impl_->counters;
}

}  // namespace hicache::daemon
