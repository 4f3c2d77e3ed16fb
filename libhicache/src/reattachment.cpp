#include "reattachment.hpp"

#include <fcntl.h>

#include <algorithm>
#include <csignal>

#include "shm/futex.hpp"

namespace hicache {
namespace {

constexpr std::uint32_t kAttemptTimeoutMs = 1000;
constexpr std::uint64_t kFirstPauseNs = 5'000'000;
constexpr std::uint64_t kLongestPauseNs = 250'000'000;
constexpr std::uint64_t kIdleNs = 1'000'000'000;  // the end of a session wakes the thread at once

}  // namespace

Session::Current::Current(std::unique_ptr<Impl> impl) : now_(impl.get()) {
  lives_.push_back(std::move(impl));
}
Session::Current::~Current() = default;

Session::Reattachment::Reattachment(const AttachOptions& options, Impl& first)
    : options_(options), watched_(&first) {
  options_.reattach = false;
  options_.timeout_ms = std::min(options.timeout_ms, kAttemptTimeoutMs);
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Session::Reattachment::~Reattachment() {
  stop();
  // NOLINTNEXTLINE(bugprone-unhandled-exception-at-new): a child without memory may end here
  if (fork_.forked() && thread_.joinable()) static_cast<void>(new std::thread(std::move(thread_)));
}

void Session::Reattachment::stop() {
  if (fork_.forked()) return;
  stop_.store(1, std::memory_order_release);
  futex_wake_all(&stop_);
  Impl& watched = *watched_.load(std::memory_order_acquire);
  futex_wake_all(&watched.end_signal);
  const std::lock_guard lock(mutex_);
  successor_.reset();
  if (thread_.joinable() && thread_.get_id() != std::this_thread::get_id()) {
    // The thread takes the mutex only to hand a session over, and not once it was asked to stop.
    thread_.join();
  }
}

void Session::Reattachment::remember(const DeviceGeometry& geometry, std::span<const int> fds,
                                     std::span<const CudaRange> ranges) {
  const std::lock_guard lock(mutex_);
  geometry_ = geometry;
  ranges_.assign(ranges.begin(), ranges.end());
  fds_.clear();
  for (const int fd : fds) fds_.emplace_back(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  registered_ = true;
}

std::unique_ptr<Session> Session::Reattachment::attach_once() {
  auto session = Session::attach(options_);
  if (!session) return nullptr;
  DeviceGeometry geometry;
  std::vector<int> fds;
  std::vector<CudaRange> ranges;
  {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return nullptr;
    if (!registered_) return std::move(*session);
    geometry = geometry_;
    ranges = ranges_;
    for (const UniqueFd& fd : fds_) fds.push_back(fd.get());
  }
  if (!(*session)->register_memory(geometry, fds, ranges, kAttemptTimeoutMs)) return nullptr;
  return std::move(*session);
}

void Session::Reattachment::run() {
  std::uint64_t pause_ns = kFirstPauseNs;
  while (stop_.load(std::memory_order_acquire) == 0) {
    Impl& watched = *watched_.load(std::memory_order_acquire);
    if (watched.end_signal.load(std::memory_order_acquire) == 0) {
      futex_wait(&watched.end_signal, 0, kIdleNs);
      pause_ns = kFirstPauseNs;
      continue;
    }
    bool wanted = false;
    if (const std::unique_lock lock(mutex_, std::try_to_lock); lock.owns_lock()) {
      wanted = successor_ == nullptr || successor_->impl_->ended();
      if (wanted) successor_.reset();
    }
    if (wanted) {
      if (auto session = attach_once()) {
        const std::unique_lock lock(mutex_, std::try_to_lock);
        if (lock.owns_lock()) successor_ = std::move(session);
        pause_ns = kFirstPauseNs;
      }
    }
    futex_wait(&stop_, 0, pause_ns);
    pause_ns = std::min(pause_ns * 2, kLongestPauseNs);
  }
}

void Session::Reattachment::switch_over(const Session& session) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || successor_ == nullptr || successor_->impl_->ended()) return;
  Impl& lost = *session.impl_;
  {
    const std::lock_guard reading(lost.mutex);
    if (lost.end_reason.load(std::memory_order_relaxed) != Status::daemon_lost) return;
    lost.look_at_daemon();  // the proof that its copies are over may be due
    if (lost.operations.in_use() != 0) return;
    // Otherwise when the session goes: its memory is not free before.
    if (lost.watch.process_gone()) lost.settle_staging(0);
    successor_->impl_->continue_from(lost);
  }
  Current& taken = successor_->impl_;
  Impl* next = &*taken;
  session.impl_.lives_.push_back(std::move(taken.lives_.front()));
  taken.now_.store(nullptr, std::memory_order_relaxed);
  successor_.reset();
  session.impl_.now_.store(next, std::memory_order_release);
  watched_.store(next, std::memory_order_release);
}

}  // namespace hicache
