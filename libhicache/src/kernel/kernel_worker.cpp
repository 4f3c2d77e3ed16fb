#include "kernel_worker.hpp"

#include <pthread.h>
#include <sched.h>

#include <csignal>

#include "shm/crash_points.hpp"
#include "shm/tripwire.hpp"

namespace hicache {
namespace {

constexpr std::uint64_t kParkNs = 100'000'000;

}  // namespace

KernelWorker::~KernelWorker() {
  end();
  if (thread_.joinable()) thread_.join();
}

void KernelWorker::start() {
  quiet_.store(false, std::memory_order_relaxed);
  // The engine's signal handlers must not run in this thread.
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void KernelWorker::end() {
  ending_.store(true, std::memory_order_release);
  requests_.wake();
}

// The daemon lives and the session goes on.
bool KernelWorker::open() const {
  return !ending_.load(std::memory_order_acquire) &&
         channel_.session_ended.load(std::memory_order_relaxed) == 0 &&
         !tripwire_fired(channel_.daemon_tripwire.load(std::memory_order_relaxed));
}

// Loads first: a request waits for them.
bool KernelWorker::serve() {
  for (const bool loads : {true, false}) {
    if (!mover_->has_room(loads) || !requests_.take(loads, work_)) continue;
    mover_->begin(work_);
    return true;
  }
  return false;
}

bool KernelWorker::report() {
  bool any = false;
  while (const auto end = mover_->next_end()) {
    requests_.end(*end);
    any = true;
  }
  return any;
}

void KernelWorker::run() {
  WaitLadder ladder(waiting_);
  while (open()) {
    bool worked = serve();
    worked |= report();
    if (worked) {
      ladder.reset();
    } else if (mover_->busy()) {
      ::sched_yield();
    } else if (!ladder.step()) {
      requests_.park(kParkNs);
    }
  }
  HICACHE_CRASH_POINT(kernel_ending);
  mover_->finish();
  report();
  quiet_.store(true, std::memory_order_release);
}

}  // namespace hicache
