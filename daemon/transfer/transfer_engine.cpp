#include "daemon/transfer/transfer_engine.hpp"

#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

#include "daemon/transfer/doorbell.hpp"
#include "daemon/transfer/job_queues.hpp"
#include "daemon/transfer/transfer_job.hpp"
#include "shm/clock.hpp"
#include "shm/waiting.hpp"

namespace hicache::daemon {
namespace {

// A job gives its thread back after this much, so that a long one delays the others by a millisecond or less.
constexpr std::uint64_t kSliceBytes = 4 * kMiB;
// A rank's write fence is a word that can't wake us: it is polled at an eighth of the wait so far within
// these bounds, so a wait is noticed 12 % late or less until it has lasted 8 ms, then 1 ms late or less.
constexpr std::uint64_t kMinPollNs = 20'000;
constexpr std::uint64_t kMaxPollNs = 1'000'000;
// A thread without work looks around a little before it sleeps: waking it costs the coordinator a system
// call.
constexpr WaitPolicy kIdleLadder{0, 50, 0};
constexpr std::uint64_t kIdleSleepNs = 1'000'000'000;
// The kernel may add its timer slack (50 us unless told otherwise) to every sleep; that is more than
// kMinPollNs.
constexpr unsigned long kTimerSlackNs = 1'000;
// Plans are kept for the next job unless they are unusually large.
constexpr std::size_t kMaxSpareRuns = 65'536;

}  // namespace

struct TransferEngine::Impl {
  Impl(const TransferOptions& o, std::unique_ptr<DeviceBackend> b, Sink s)
      : options(o), backend(std::move(b)), sink(std::move(s)) {}

  void thread_body();
  void stop();
  TransferJobPtr next_job();
  void put_back(TransferJobPtr job);
  template <class Fits>
  void end_jobs_and_ring(Status status, Fits fits);

  // All of these with `mutex` held.
  // Ends the jobs that fit and have not started.
  template <class Fits>
  void end_jobs(Status status, Fits fits);
  void take_in();
  void poll_fences(std::uint64_t now);
  TransferJobPtr pick(std::uint64_t now);
  [[nodiscard]] bool needs_another_thread() const;
  void rest(std::unique_lock<std::mutex>& lock, WaitLadder& ladder);

  const TransferOptions options;
  const std::unique_ptr<DeviceBackend> backend;
  const Sink sink;

  JobInbox inbox;
  Doorbell bell;
  std::atomic<bool> stopping{false};  // release in the destructor, acquire in the threads

  // Held by transfer threads between jobs and by cancel; never while bytes are copied or the sink runs.
  std::mutex mutex;
  JobList ended;          // verdict known, the sink has to be told
  JobList fence_waiting;  // writes whose fence has not been reached
  FairQueue ready[2];     // by Priority
  std::uint64_t next_poll_ns = 0;
  bool poller_asleep = false;  // one sleeping thread wakes up by itself for the fences; the others sleep on

  std::vector<std::thread> threads;
};

namespace {

// Loads first: a request waits for them, while a write only has to end before its deadline.
std::size_t priority_of(const TransferJob& job) {
  return job.transfer.direction == Direction::load ? 0 : 1;
}

}  // namespace

void TransferEngine::Impl::take_in() {
  JobList jobs = inbox.take_all();
  while (TransferJobPtr job = jobs.pop_front()) {
    if (job->verdict != Status::ok) {
      ended.push_back(std::move(job));
    } else if (job->may_start()) {
      FairQueue& queue = ready[priority_of(*job)];
      queue.push_back(std::move(job));
    } else {
      job->arrived_ns = monotonic_ns();
      next_poll_ns = std::min(next_poll_ns, job->arrived_ns + kMinPollNs);
      if (fence_waiting.empty()) next_poll_ns = job->arrived_ns + kMinPollNs;
      fence_waiting.push_back(std::move(job));
    }
  }
}

void TransferEngine::Impl::poll_fences(std::uint64_t now) {
  if (fence_waiting.empty() || now < next_poll_ns) return;
  std::uint64_t youngest = 0;
  fence_waiting.filter([&](TransferJobPtr job) -> TransferJobPtr {
    if (job->may_start()) {
      FairQueue& queue = ready[priority_of(*job)];
      queue.push_back(std::move(job));
      return nullptr;
    }
    if (job->expired(now)) {
      job->verdict = Status::timed_out;
      ended.push_back(std::move(job));
      return nullptr;
    }
    youngest = std::max(youngest, job->arrived_ns);
    return job;
  });
  next_poll_ns = now + std::clamp((now - std::min(now, youngest)) / 8, kMinPollNs, kMaxPollNs);
}

TransferJobPtr TransferEngine::Impl::pick(std::uint64_t now) {
  if (TransferJobPtr job = ended.pop_front()) return job;
  for (FairQueue& queue : ready) {
    TransferJobPtr job = queue.pop();
    if (job == nullptr) continue;
    if (job->expired(now)) job->verdict = Status::timed_out;
    return job;
  }
  return nullptr;
}

bool TransferEngine::Impl::needs_another_thread() const {
  return !ended.empty() || !ready[0].empty() || !ready[1].empty() ||
         (!fence_waiting.empty() && !poller_asleep);
}

// Waits for work or for the next look at the fences.
void TransferEngine::Impl::rest(std::unique_lock<std::mutex>& lock, WaitLadder& ladder) {
  if (fence_waiting.empty()) {
    lock.unlock();
    while (ladder.step()) {
      if (!inbox.empty() || stopping.load(std::memory_order_acquire)) {
        lock.lock();
        return;
      }
    }
    lock.lock();
    // Another thread may have left something in the lists meanwhile.
    if (needs_another_thread()) return;
  }
  const bool poller = !fence_waiting.empty() && !poller_asleep;
  const std::uint64_t now = monotonic_ns();
  const std::uint64_t pause = poller ? next_poll_ns - std::min(next_poll_ns, now) : kIdleSleepNs;
  if (poller) poller_asleep = true;
  // Before the lock is given up: whoever changes the lists from now on sees this sleeper.
  const std::uint32_t key = bell.lie_down();
  lock.unlock();
  if (inbox.empty() && !stopping.load(std::memory_order_acquire) && pause > 0) bell.sleep(key, pause);
  bell.get_up();
  lock.lock();
  if (poller) poller_asleep = false;
}

// The next job to work on or to report. Null when the engine stops and nothing is left.
TransferJobPtr TransferEngine::Impl::next_job() {
  WaitLadder ladder(kIdleLadder);
  std::unique_lock lock(mutex);
  for (;;) {
    take_in();
    if (stopping.load(std::memory_order_acquire)) {
      end_jobs(Status::shutting_down, [](const TransferJob&) { return true; });
    }
    const std::uint64_t now = monotonic_ns();
    poll_fences(now);
    if (TransferJobPtr job = pick(now)) {
      const bool call = needs_another_thread();
      lock.unlock();
      if (call) bell.ring();
      return job;
    }
    if (stopping.load(std::memory_order_acquire)) return nullptr;
    rest(lock, ladder);
  }
}

void TransferEngine::Impl::put_back(TransferJobPtr job) {
  const std::lock_guard lock(mutex);
  take_in();  // clients that came meanwhile go before this one
  FairQueue& queue = ready[priority_of(*job)];
  queue.push_front(std::move(job));
}

template <class Fits>
void TransferEngine::Impl::end_jobs(Status status, Fits fits) {
  auto keep = [&](TransferJobPtr job) -> TransferJobPtr {
    if (job->started || !fits(*job)) return job;
    job->verdict = status;
    ended.push_back(std::move(job));
    return nullptr;
  };
  fence_waiting.filter(keep);
  for (FairQueue& queue : ready) queue.filter(keep);
}

template <class Fits>
void TransferEngine::Impl::end_jobs_and_ring(Status status, Fits fits) {
  {
    const std::lock_guard lock(mutex);
    take_in();
    end_jobs(status, fits);
  }
  bell.ring();
}

void TransferEngine::Impl::thread_body() {
  ::prctl(PR_SET_TIMERSLACK, kTimerSlackNs, 0, 0, 0);
  CopyPlan spare;
  while (TransferJobPtr job = next_job()) {
    if (!job->started) std::swap(job->plan, spare);
    if (!job->advance(*backend, options, kSliceBytes)) {
      put_back(std::move(job));
      continue;
    }
    std::swap(job->plan, spare);
    spare.runs.clear();
    if (spare.runs.capacity() > kMaxSpareRuns) spare.runs.shrink_to_fit();
    sink(job->finish(options));
  }
}

void TransferEngine::Impl::stop() {
  stopping.store(true, std::memory_order_release);
  bell.ring_all();
  for (std::thread& thread : threads) thread.join();
}

TransferEngine::TransferEngine(const TransferOptions& options, std::unique_ptr<DeviceBackend> backend,
                               Sink sink)
    : impl_(std::make_unique<Impl>(options, std::move(backend), std::move(sink))) {
  const std::uint32_t threads = std::max(options.threads, 1u);
  impl_->threads.reserve(threads);
  try {
    for (std::uint32_t i = 0; i < threads; ++i) {
      impl_->threads.emplace_back([impl = impl_.get()] { impl->thread_body(); });
    }
  } catch (...) {
    impl_->stop();  // a thread that could not be made is an error at start-up; those that were made must end
                    // first
    throw;
  }
}

TransferEngine::~TransferEngine() {
  impl_->stop();
}

void TransferEngine::submit(Transfer transfer) {
  auto job = std::make_unique<TransferJob>(std::move(transfer));
  job->admit();
  impl_->inbox.push(std::move(job));
  impl_->bell.ring();
}

void TransferEngine::cancel(TransferId id) {
  impl_->end_jobs_and_ring(Status::timed_out, [id](const TransferJob& job) { return job.transfer.id == id; });
}

void TransferEngine::cancel_client(ClientSlot client, Generation generation) {
  impl_->end_jobs_and_ring(Status::peer_lost, [client, generation](const TransferJob& job) {
    return job.transfer.memory->client == client && job.transfer.memory->client_generation == generation;
  });
}

}  // namespace hicache::daemon
