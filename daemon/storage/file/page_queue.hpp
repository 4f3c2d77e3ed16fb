// The batches a backend has accepted and not ended: what is to be done next, and what the sink has been told.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "daemon/storage/backend.hpp"

namespace hicache::daemon {

// An accepted batch. Pages are taken in order; `next` is the first that has not begun.
struct AcceptedBatch {
  StorageBatch batch;
  std::uint32_t next = 0;  // guarded by the queue's lock, as the two below
  bool cancelled = false;
  bool refused = false;  // too much was queued
  // SYNC batch-outcomes: fetch_sub (acq_rel) after a page's outcome went to the sink -> the thread that takes
  //   it to 0 says `ended`. Weaker: `ended` could overtake another thread's page.
  std::atomic<std::uint32_t> open{0};
};

struct QueuedPage {
  std::shared_ptr<AcceptedBatch> batch;
  std::uint32_t index = 0;

  [[nodiscard]] const PrefixHash& hash() const { return batch->batch.hashes[index]; }
  [[nodiscard]] const StorageNamespace& ns() const { return *batch->batch.ns; }
  [[nodiscard]] std::span<const PoolExtent> buffers() const { return batch->batch.buffers_of(index); }
};

// Thread safety: every method may be called from any thread. The sink is called without the lock held.
class PageQueue {
 public:
  // Puts of more than `max_put_pages` waiting pages are dropped.
  PageQueue(StorageSink& sink, std::size_t max_put_pages) : sink_(sink), max_put_pages_(max_put_pages) {}

  void accept(StorageBatch batch);
  void cancel(StorageBatchId id);
  // No page begins any more: what waits ends with closed.
  void close();

  // Ends pages that may not begin any more: cancelled, past their deadline, dropped, or closed. On a thread
  // of the backend, at each of its turns.
  void sweep(std::uint64_t now_ns);
  // The next page of that kind, which has begun with this; nothing when none waits.
  std::optional<QueuedPage> take(StorageOperation operation, std::uint64_t now_ns);
  // A put that was taken and can't begin yet: it waits again, before all others.
  void put_back(QueuedPage page);
  // The outcome of a page that was taken.
  void finish(const QueuedPage& page, Status outcome);

  // Pages wait that have not begun.
  [[nodiscard]] bool waiting() const;

 private:
  using Line = std::deque<std::shared_ptr<AcceptedBatch>>;
  // Under the lock: what a page of that batch that has not begun ends with, ok = it may begin.
  [[nodiscard]] Status verdict(const AcceptedBatch& batch, std::uint64_t now_ns) const;
  [[nodiscard]] Line& line(StorageOperation operation) { return lines_[static_cast<std::size_t>(operation)]; }

  StorageSink& sink_;
  const std::size_t max_put_pages_;
  mutable std::mutex mutex_;
  Line lines_[3];                    // by StorageOperation
  std::deque<QueuedPage> put_back_;  // puts
  std::size_t put_pages_ = 0;
  bool closed_ = false;
};

}  // namespace hicache::daemon
