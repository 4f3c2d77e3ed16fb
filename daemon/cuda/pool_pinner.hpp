// Pins the pool for the GPUs, in the background and in parallel, piece by piece from its start: what is
// pinned serves at once. No copy may cross a border of pieces.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "daemon/cuda/gpu.hpp"
#include "shm/types.hpp"

namespace hicache::daemon {

// Thread-safe.
class PoolPinner {
 public:
  // One registration of hundreds of GiB fails or stalls other processes; this is long enough to be cheap.
  static constexpr std::uint64_t kPieceBytes = 256 * kMiB;
  enum class State { idle, running, done, failed };

  // `progress` is called from the pinner's threads with the bytes that may be used from the pool's start on.
  PoolPinner(std::uint8_t* pool, std::uint64_t bytes, std::function<void(std::uint64_t)> progress);
  // Stops after the pieces at hand, and unpins.
  ~PoolPinner();
  PoolPinner(const PoolPinner&) = delete;
  PoolPinner& operator=(const PoolPinner&) = delete;

  // Begins, with the first GPU that has a context; what is pinned is pinned for all. Later calls do nothing.
  void start(std::shared_ptr<Gpu> gpu);
  // Waits until the first piece serves. Fails with the reason why it cannot be pinned.
  Outcome wait_for_first_piece();
  // Bytes from the pool's start that are pinned.
  [[nodiscard]] std::uint64_t pinned_bytes() const { return pinned_.load(std::memory_order_acquire); }
  // True when nothing more will be pinned, although something is missing.
  [[nodiscard]] bool failed() const { return state_.load(std::memory_order_acquire) == State::failed; }
  [[nodiscard]] State state() const { return state_.load(std::memory_order_acquire); }

 private:
  void thread_body();
  Outcome pin(std::size_t piece);
  void piece_done(std::size_t piece, const Outcome& outcome);
  [[nodiscard]] std::uint64_t end_of(std::size_t piece) const;

  std::uint8_t* const pool_;
  const std::uint64_t bytes_;
  const std::function<void(std::uint64_t)> progress_;
  std::shared_ptr<Gpu> gpu_;  // set before the threads start

  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t next_ = 0;      // guarded by mutex_
  std::vector<bool> pieces_;  // guarded by mutex_: pinned
  std::size_t prefix_ = 0;    // guarded by mutex_: pieces pinned from the start on
  std::size_t running_ = 0;   // guarded by mutex_: threads
  bool stopping_ = false;     // guarded by mutex_
  std::string error_;         // guarded by mutex_
  std::uint64_t started_ns_ = 0;

  // SYNC pinned: stored with release after a piece was registered, read with acquire before a copy uses it.
  std::atomic<std::uint64_t> pinned_{0};
  std::atomic<State> state_{State::idle};
  std::vector<std::thread> threads_;
};

}  // namespace hicache::daemon
