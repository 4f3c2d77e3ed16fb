#include "daemon/cuda/page_checksums.hpp"

#include <algorithm>
#include <utility>

namespace hicache::daemon {
namespace {

// A slice is what a thread does in about half a millisecond.
constexpr std::uint64_t kSliceBytes = 8 * kMiB;

std::size_t shards_of_slice(std::uint64_t shard_bytes) {
  return std::max<std::size_t>(1, kSliceBytes / std::max<std::uint64_t>(1, shard_bytes));
}

}  // namespace

PageChecksums::PageChecksums(const ShardChecksums& checksums, std::uint32_t threads) : checksums_(checksums) {
  for (std::uint32_t i = 0; i < threads; ++i) threads_.emplace_back([this] { run(); });
}

PageChecksums::~PageChecksums() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void PageChecksums::submit(std::shared_ptr<ChecksumBatch> batch) {
  const std::size_t size = shards_of_slice(batch->shard_bytes);
  const std::size_t slices = (batch->shards.size() + size - 1) / size;
  if (slices == 0) return batch->done(*batch);
  batch->left.store(slices, std::memory_order_relaxed);  // the mutex publishes it
  {
    const std::lock_guard lock(mutex_);
    slices_.insert(slices_.end(), slices, batch);
  }
  changed_.notify_all();
}

void PageChecksums::work(ChecksumBatch& batch) {
  const std::size_t size = shards_of_slice(batch.shard_bytes);
  const std::size_t first = batch.next.fetch_add(size, std::memory_order_relaxed);
  const std::size_t end = std::min(first + size, batch.shards.size());
  for (std::size_t i = first; i < end; ++i) {
    if (!batch.compare) {
      checksums_.record(batch.shards[i], batch.shard_bytes);
    } else if (!checksums_.matches(batch.shards[i], batch.shard_bytes)) {
      const std::lock_guard lock(batch.mutex);
      batch.corrupt.push_back(batch.shards[i]);
    }
  }
  if (batch.left.fetch_sub(1, std::memory_order_acq_rel) == 1) batch.done(batch);
}

void PageChecksums::run() {
  for (;;) {
    std::shared_ptr<ChecksumBatch> batch;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stopping_ || !slices_.empty(); });
      if (slices_.empty()) return;
      batch = std::move(slices_.front());
      slices_.pop_front();
    }
    work(*batch);
  }
}

}  // namespace hicache::daemon
