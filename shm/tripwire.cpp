#include "shm/tripwire.hpp"

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "shm/futex.hpp"

namespace hicache {
namespace {

constexpr std::uint64_t kLookAgainNs =
    5'000'000'000;  // only against a wake-up that the other side never sends

// What the kernel walks when the thread dies: a ring of one node, both in private memory.
class RobustList {
 public:
  explicit RobustList(std::atomic<std::uint32_t>* word) {
    head_.list.next = &node_;
    node_.next = &head_.list;
    head_.futex_offset = reinterpret_cast<char*>(word) - reinterpret_cast<char*>(&node_);
    head_.list_op_pending = nullptr;
    registered_ = ::syscall(SYS_set_robust_list, &head_, sizeof head_) == 0;
  }
  // The head must outlive the thread or be replaced: the thread goes on without robust futexes.
  ~RobustList() { ::syscall(SYS_set_robust_list, nullptr, sizeof head_); }
  RobustList(const RobustList&) = delete;
  RobustList& operator=(const RobustList&) = delete;
  [[nodiscard]] bool registered() const { return registered_; }

 private:
  robust_list node_{};
  robust_list_head head_{};
  bool registered_ = false;
};

}  // namespace

void TripwireStop::stop(const std::atomic<std::uint32_t>* theirs) {
  asked_.store(true, std::memory_order_release);
  while (!finished_.load(std::memory_order_acquire)) {
    // Again and again: the thread may have looked at the request just before it went to sleep.
    futex_wake_all(theirs);
    const timespec nap{0, 50'000};
    ::nanosleep(&nap, nullptr);
  }
}

void hold_tripwire(std::atomic<std::uint32_t>* mine, const std::atomic<std::uint32_t>* theirs,
                   TripwireStop& stop, const std::function<bool(std::uint32_t)>& changed) {
  {
    const RobustList list(mine);
    if (list.registered()) {
      // FUTEX_WAITERS from the start: the kernel wakes only where it is set, and the waiter must not need to
      // write.
      const auto tid = static_cast<std::uint32_t>(::syscall(SYS_gettid));
      mine->store(tid | FUTEX_WAITERS, std::memory_order_release);
      futex_wake_all(mine);
    }
    std::uint32_t seen = theirs->load(std::memory_order_acquire);
    bool go_on = changed(seen);
    while (go_on && !stop.asked()) {
      futex_wait(theirs, seen, kLookAgainNs);
      const std::uint32_t now = theirs->load(std::memory_order_acquire);
      if (now == seen) continue;
      seen = now;
      go_on = changed(seen);
    }
    mine->store(0, std::memory_order_release);
    futex_wake_all(mine);
  }
  stop.finished();
}

}  // namespace hicache
