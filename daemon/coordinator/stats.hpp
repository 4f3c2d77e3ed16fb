// The counters and commit sequence of the control region, as the coordinator writes them.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>

#include "shm/counters.hpp"
#include "shm/region_layout.hpp"

namespace hicache::daemon {

// Single writer: a plain load and store is enough, and cheaper than an atomic addition.
template <class Rep>
void bump(std::atomic<Rep>& word, Rep by = 1) {
  word.store(static_cast<Rep>(word.load(std::memory_order_relaxed) + by), std::memory_order_relaxed);
}
template <class Rep>
void lower(std::atomic<Rep>& word, Rep by = 1) {
  word.store(static_cast<Rep>(word.load(std::memory_order_relaxed) - by), std::memory_order_relaxed);
}

class Stats {
 public:
  Stats() = default;
  explicit Stats(std::span<A64> counters) : counters_(counters) {}
  void add(Counter counter, std::uint64_t by = 1) {
    bump(counters_[static_cast<std::uint32_t>(counter)], by);
  }
  void sub(Counter gauge, std::uint64_t by = 1) { lower(counters_[static_cast<std::uint32_t>(gauge)], by); }
  void set(Counter gauge, std::uint64_t value) {
    counters_[static_cast<std::uint32_t>(gauge)].store(value, std::memory_order_relaxed);
  }
  [[nodiscard]] std::uint64_t get(Counter counter) const {
    return counters_[static_cast<std::uint32_t>(counter)].load(std::memory_order_relaxed);
  }

 private:
  std::span<A64> counters_;
};

// Marks a stretch in which tables change together. Nesting is fine: only the outermost counts.
// SYNC commit: odd is stored, then a release fence, before the first change; even is stored (release) after
// the last.
//   A tool reads even, copies, fences (acquire), reads the same value: what it copied belongs together.
class CommitScope {
 public:
  CommitScope(A64& sequence, std::uint32_t& depth) : sequence_(sequence), depth_(depth) {
    if (depth_++ == 0) {
      bump(sequence_);
      std::atomic_thread_fence(std::memory_order_release);  // SYNC commit
    }
  }
  ~CommitScope() {
    if (--depth_ == 0) {
      sequence_.store(sequence_.load(std::memory_order_relaxed) + 1,
                      std::memory_order_release);  // SYNC commit
    }
  }
  CommitScope(const CommitScope&) = delete;
  CommitScope& operator=(const CommitScope&) = delete;

 private:
  A64& sequence_;
  std::uint32_t& depth_;
};

}  // namespace hicache::daemon
