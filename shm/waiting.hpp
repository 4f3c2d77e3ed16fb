// The waiting ladder: spin, then yield, then park with a time-out, and the handshake that makes parking safe.
//
// SYNC park: the sleeper stores its "sleeping" word, fences (sequentially consistent), looks for work again,
// and only
//   then sleeps. The producer publishes, fences (sequentially consistent), reads the word, and kicks a
//   sleeper. One of the two sees the other. Weaker on either side: both could read the old value, and the
//   sleeper would sleep through published work until its time-out. Such time-outs are counted as late_wakes
//   and stay 0.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

#include "shm/clock.hpp"

namespace hicache {

// Budgets of the ladder; see docs/configuration.md (`waiting`).
struct WaitPolicy {
  std::uint32_t spin_us = 0;      // busy-wait; 0 where clients may outnumber cores
  std::uint32_t yield_us = 1000;  // then give the core away between looks
  std::uint32_t park_ms = 50;     // then sleep, at most this long before looking again
};

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

// The full fence of SYNC park.
inline void park_fence() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

// Steps through spin and yield; says when it is time to park. Not thread-safe, one per waiter.
class WaitLadder {
 public:
  explicit WaitLadder(const WaitPolicy& policy) : policy_(policy) {}

  void reset() {
    looks_ = 0;
    spinning_ = true;
  }
  // One step. Returns false when the caller should park.
  bool step() {
    if (looks_ == 0) start_ns_ = monotonic_ns();
    ++looks_;
    // The clock costs as much as several looks: read it every 16th while spinning.
    if (spinning_ && policy_.spin_us > 0) {
      cpu_relax();
      if (looks_ % 16 == 0 && elapsed_us() >= policy_.spin_us) spinning_ = false;
      return true;
    }
    if (policy_.yield_us == 0) return reset_phase(false);
    ::sched_yield();
    if (elapsed_us() >= std::uint64_t{policy_.spin_us} + policy_.yield_us) return reset_phase(false);
    return true;
  }

 private:
  bool reset_phase(bool value) {
    spinning_ = true;
    looks_ = 0;
    return value;
  }
  [[nodiscard]] std::uint64_t elapsed_us() const { return (monotonic_ns() - start_ns_) / 1000; }

  WaitPolicy policy_;
  std::uint64_t start_ns_ = 0;
  std::uint32_t looks_ = 0;
  bool spinning_ = true;
};

}  // namespace hicache
