// The coordinator's inbox: requests from other threads of the daemon, and the kick that wakes a sleeping
// coordinator.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "daemon/coordinator/requests.hpp"
#include "shm/fd.hpp"
#include "shm/waiting.hpp"

namespace hicache::daemon {

// Thread safety: post from any thread; everything else from the coordinator's thread.
class Inbox {
 public:
  Inbox() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

  void post(CoordinatorRequest request) {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(std::move(request));
      filled_.store(true, std::memory_order_release);  // pairs with the acquire in take()
    }
    park_fence();  // SYNC park: the coordinator stores sleeping_, fences, looks at filled_
    if (sleeping_.load(std::memory_order_relaxed)) kick();
  }
  void kick() const {
    const std::uint64_t one = 1;
    // A full counter means that a kick is pending already.
    [[maybe_unused]] const ssize_t rc = ::write(event_.get(), &one, sizeof one);
  }

  [[nodiscard]] bool filled() const { return filled_.load(std::memory_order_acquire); }
  // Swaps the queued requests into `out`, which must be empty.
  void take(std::vector<CoordinatorRequest>& out) {
    const std::lock_guard lock(mutex_);
    filled_.store(false, std::memory_order_relaxed);
    out.swap(queue_);
  }
  void set_sleeping(bool sleeping) { sleeping_.store(sleeping, std::memory_order_relaxed); }
  [[nodiscard]] int event_fd() const { return event_.get(); }

 private:
  std::mutex mutex_;
  std::vector<CoordinatorRequest> queue_;
  std::atomic<bool> filled_{false};
  std::atomic<bool> sleeping_{false};
  UniqueFd event_;
};

}  // namespace hicache::daemon
