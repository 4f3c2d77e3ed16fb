#include "daemon/storage/redis/page_operation.hpp"

#include <utility>

#include "daemon/storage/redis/cluster.hpp"
#include "shm/prefix_hash.hpp"

namespace hicache::daemon::redis {

void BatchProgress::end_page(std::uint32_t page, Status outcome) {
  if (outcome == Status::corrupt) counters_.corrupt_pages.fetch_add(1, std::memory_order_relaxed);
  if (outcome == Status::system_error || outcome == Status::no_space) {
    counters_.failed_operations.fetch_add(1, std::memory_order_relaxed);
  }
  const StorageBatchId id = batch_.id;
  sink_.page(id, page, outcome);
  if (open_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  // Before `ended`, so that the caller may use the id again. The caller of this holds the batch alive.
  home_.forget(id);
  sink_.ended(id);
}

std::shared_ptr<BatchProgress> Batches::add(StorageBatch batch, StorageSink& sink, Counters& counters) {
  const std::uint64_t id = batch.id.value;
  auto progress = std::make_shared<BatchProgress>(std::move(batch), *this, sink, counters);
  const std::lock_guard lock(mutex_);
  batches_[id] = progress;
  return progress;
}

bool Batches::cancel(StorageBatchId id) {
  const std::lock_guard lock(mutex_);
  const auto found = batches_.find(id.value);
  if (found == batches_.end()) return false;
  found->second->cancel();
  return true;
}

void Batches::forget(StorageBatchId id) {
  const std::lock_guard lock(mutex_);
  batches_.erase(id.value);
}

std::string page_key(const std::string& prefix, const StorageNamespace& ns, const PrefixHash& hash) {
  return prefix + ":" + to_hex(ns.digest) + ":" + to_hex(hash);
}

PageOperation::PageOperation(std::shared_ptr<BatchProgress> batch, std::uint32_t page, std::string key)
    : step(batch->batch().operation == StorageOperation::get ? Step::read : Step::probe),
      batch_(std::move(batch)),
      page_(page),
      key_(std::move(key)),
      slot_(cluster_slot(key_)) {}

void PageOperation::finish(Status outcome) {
  if (const auto batch = std::exchange(batch_, nullptr)) batch->end_page(page_, outcome);
}

std::vector<std::span<std::byte>> PageOperation::payload(const StoragePool& pool) const {
  std::vector<std::span<std::byte>> payload;
  const std::uint64_t bytes = batch().ns->spec.shard_bytes();
  for (const PoolExtent& extent : batch().buffers_of(page_)) payload.push_back(pool.at(extent).first(bytes));
  return payload;
}

}  // namespace hicache::daemon::redis
