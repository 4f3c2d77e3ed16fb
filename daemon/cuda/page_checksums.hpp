// Checksums of pages that GPUs write and load, made by threads of their own: a GPU's transfer thread must not
// stop handing out copies for them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "daemon/integrity/shard_checksums.hpp"
#include "daemon/transfer/planner.hpp"

namespace hicache::daemon {

// The pages of one transfer on their way through the threads.
struct ChecksumBatch {
  std::vector<PoolOffset> shards;
  std::uint64_t shard_bytes = 0;
  bool compare = false;  // loads; else checksums are recorded
  // Called by the thread that has done the last shard.
  std::function<void(ChecksumBatch&)> done;

  std::vector<PoolOffset> corrupt;  // guarded by mutex until done: shards whose checksum was wrong
  std::mutex mutex;
  std::atomic<std::size_t> next{0};  // the first shard that nobody has taken
  std::atomic<std::size_t> left{
      0};  // slices; whoever takes the last one to 0 (acq_rel) sees all of them done
};

// Thread-safe.
class PageChecksums {
 public:
  PageChecksums(const ShardChecksums& checksums, std::uint32_t threads);
  // Does what is queued, then joins.
  ~PageChecksums();
  PageChecksums(const PageChecksums&) = delete;
  PageChecksums& operator=(const PageChecksums&) = delete;

  [[nodiscard]] const ShardChecksums& policy() const { return checksums_; }
  // Precondition: every shard lies in the pool; nobody writes it until `done`.
  void submit(std::shared_ptr<ChecksumBatch> batch);

 private:
  void run();
  void work(ChecksumBatch& batch);

  const ShardChecksums& checksums_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<ChecksumBatch>>
      slices_;             // guarded by mutex_: a batch once for each of its slices
  bool stopping_ = false;  // guarded by mutex_
  std::vector<std::thread> threads_;
};

}  // namespace hicache::daemon
