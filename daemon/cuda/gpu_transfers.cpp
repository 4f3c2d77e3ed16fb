#include "daemon/cuda/gpu_transfers.hpp"

#include <spdlog/spdlog.h>
#include <sys/prctl.h>

#include <algorithm>
#include <utility>

#include "daemon/cuda/gpu_transfers_impl.hpp"
#include "shm/clock.hpp"
#include "shm/waiting.hpp"

namespace hicache::daemon {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;
// After work the thread looks again at once for this long, then in growing pauses within these bounds.
constexpr std::uint64_t kAlertNs = 200'000;
constexpr std::uint64_t kMinPauseNs = 20'000;
constexpr std::uint64_t kMaxPauseCopyingNs = 50'000;
constexpr std::uint64_t kMaxPauseWaitingNs = 1'000'000;
constexpr std::uint64_t kIdlePauseNs = 1'000'000'000;
constexpr unsigned long kTimerSlackNs = 1'000;
// How long a stopping daemon waits for a rank that has a piece of staging memory in work.
constexpr std::uint64_t kStopPatienceNs = 1'000'000'000;

}  // namespace

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
    begin_comparing(added);
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
    const bool may_go = !still_comparing(*job) && gathered(*job, kept, now);
    const auto status = may_go ? ready_to_run(*job, now) : std::nullopt;
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
  for (const Cancellation& c : taken) {
    end_all(&c, c.status);
    for (const ActiveLane& entry : active) {
      const RankMemory& rank = *entry.memory;
      if (c.id.value == 0 && rank.client == c.client && rank.client_generation == c.generation)
        entry.lane->peer_gone = true;
    }
  }
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
    const std::uint64_t now = monotonic_ns();
    if (stop) end_all(nullptr, Status::shutting_down);
    if (stop && give_up_ns == 0) give_up_ns = now + kStopPatienceNs;
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
                           ExchangeTable& exchanges, TransferSink sink, const ShardChecksums* checksums,
                           std::uint32_t checksum_threads)
    : impl_(std::make_unique<Impl>(std::move(gpu), pool, pinner, exchanges, std::move(sink), checksums,
                                   checksum_threads)) {
  impl_->thread = std::thread([impl = impl_.get()] { impl->thread_body(); });
}

GpuTransfers::~GpuTransfers() {
  impl_->stopping.store(true, std::memory_order_release);
  impl_->bell->ring_all();
  impl_->thread.join();
  impl_->checksums.reset();  // its threads ring the bell
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
