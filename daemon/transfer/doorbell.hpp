// How transfer threads sleep and are woken. Ringing costs one fence and one load while nobody sleeps, and one
// system call for a burst of work while somebody does.
//
// SYNC doorbell: a sleeper counts itself in `sleeping_`, fences, looks for work again, and only then sleeps
// on
//   `wake_`. The producer publishes work, fences, and reads `sleeping_`. One of the two sees the other.
#pragma once

#include <atomic>
#include <cstdint>

#include "shm/futex.hpp"
#include "shm/waiting.hpp"

namespace hicache::daemon {

class Doorbell {
 public:
  // Wakes one sleeper, if there is one that nobody has called yet. Call after the work was published.
  void ring() {
    park_fence();  // SYNC doorbell
    if (sleeping_.load(std::memory_order_relaxed) == 0) return;
    // A thread that was called takes all work there is when it comes: calling it again would be a wasted
    // system call.
    if (called_.exchange(1, std::memory_order_acq_rel) != 0) return;
    wake_.fetch_add(1, std::memory_order_release);
    futex_wake_one(&wake_);
  }
  void ring_all() {
    wake_.fetch_add(1, std::memory_order_release);
    futex_wake_all(&wake_);
  }

  // Announces that the caller is about to sleep; returns the key for sleep(). The caller then looks for work
  // once more and calls sleep() if there is none, and get_up() in any case.
  std::uint32_t lie_down() {
    sleeping_.fetch_add(1, std::memory_order_relaxed);
    called_.exchange(
        0, std::memory_order_acq_rel);  // a call that found nobody asleep must not silence later ones
    const std::uint32_t key = wake_.load(std::memory_order_acquire);
    park_fence();  // SYNC doorbell
    return key;
  }
  void sleep(std::uint32_t key, std::uint64_t timeout_ns) { futex_wait(&wake_, key, timeout_ns); }
  void get_up() {
    sleeping_.fetch_sub(1, std::memory_order_relaxed);
    // Pairs with the exchange in ring(): work published before a call that was left out is visible from here
    // on.
    called_.exchange(0, std::memory_order_acq_rel);
  }

 private:
  std::atomic<std::uint32_t> sleeping_{0};  // threads asleep or about to be
  std::atomic<std::uint32_t> called_{0};    // 1: a sleeper was called and has not come yet
  std::atomic<std::uint32_t> wake_{0};      // futex word, grows with every call
};

}  // namespace hicache::daemon
