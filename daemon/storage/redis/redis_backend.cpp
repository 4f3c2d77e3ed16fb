#include "daemon/storage/redis/redis_backend.hpp"

#include <cassert>
#include <exception>
#include <utility>
#include <vector>

#include "daemon/integrity/shard_checksums.hpp"
#include "daemon/storage/redis/page_operation.hpp"
#include "daemon/storage/redis/settings.hpp"
#include "daemon/storage/redis/worker.hpp"

namespace hicache::daemon {
namespace redis {
namespace {

class RedisBackend final : public StorageBackend {
 public:
  RedisBackend(Settings settings, const StoragePool& pool, StorageSink& sink) : sink_(sink) {
    shared_.settings = std::move(settings);
    shared_.pool = pool;
  }
  Outcome start() {
    for (std::uint32_t i = 0; i < shared_.settings.threads; ++i) {
      auto worker = Worker::start(shared_);
      if (!worker) return worker.error();
      workers_.push_back(std::move(*worker));
    }
    return success();
  }

  [[nodiscard]] std::string_view name() const override { return "redis"; }

  void submit(StorageBatch batch) override {
    assert(batch.pages() > 0 && batch.pages() <= kStorageBatchPages);
    check_buffers(batch);
    const StorageBatchId id = batch.id;
    const auto count = static_cast<std::uint32_t>(batch.pages());
    std::shared_ptr<BatchProgress> progress;
    std::uint32_t page = 0;
    try {
      progress = batches_.add(std::move(batch), sink_, counters_);
      std::vector<std::vector<PageOperationPtr>> shares(workers_.size());
      for (auto& share : shares) share.reserve(count / shares.size() + 1);
      for (; page < count; ++page) {
        shares[page % shares.size()].push_back(std::make_unique<PageOperation>(
            progress, page,
            page_key(shared_.settings.key_prefix, *progress->batch().ns, progress->batch().hashes[page])));
      }
      for (std::size_t i = 0; i < shares.size(); ++i) {
        if (!shares[i].empty()) workers_[i]->submit(std::move(shares[i]));
      }
    } catch (const std::exception&) {
      // No memory. Pages that were begun have ended with their operation; the others get their outcome here.
      for (; page < count; ++page) {
        progress != nullptr ? progress->end_page(page, Status::system_error)
                            : sink_.page(id, page, Status::system_error);
      }
      if (progress == nullptr) sink_.ended(id);
    }
  }

  void cancel(StorageBatchId batch) override {
    if (!batches_.cancel(batch)) return;
    for (const auto& worker : workers_) worker->wake();
  }

  // Begins it: until it has ended nothing is found and nothing is kept.
  Outcome clear() override {
    if (const StorageHealth now = health(); !now.usable) return Error{Status::system_error, now.text, 0};
    if (!shared_.clearing.exchange(true, std::memory_order_relaxed)) workers_.front()->clear();
    return success();
  }

  [[nodiscard]] StorageHealth health() const override {
    WorkerHealth worst = workers_.front()->health();
    for (const auto& worker : workers_) {
      const WorkerHealth one = worker->health();
      if (one.up < worst.up || worst.problem.empty()) worst = one;
    }
    const Settings& settings = shared_.settings;
    std::string text = settings.cluster ? "redis cluster: " + std::to_string(worst.up) + " of " +
                                              std::to_string(worst.servers) + " nodes connected"
                                        : "redis at " + settings.endpoints.front().text;
    if (!settings.cluster) text += worst.up > 0 ? ": connected" : ": not connected";
    if (!worst.problem.empty()) text += "; " + worst.problem;
    return {worst.up > 0, std::move(text)};
  }

  // Pages, bytes and capacity are the server's, which others use too: unknown.
  [[nodiscard]] StorageStats stats() const override {
    StorageStats stats;
    stats.corrupt_pages = counters_.corrupt_pages.load(std::memory_order_relaxed);
    stats.failed_operations = counters_.failed_operations.load(std::memory_order_relaxed);
    return stats;
  }

 private:
  // Every buffer is checked before the first byte: a shard lies inside its extent, and that inside the pool.
  void check_buffers(const StorageBatch& batch) const {
    if (batch.operation == StorageOperation::exists) return;
    const NamespaceSpec& spec = batch.ns->spec;
    assert(batch.buffers.size() == batch.pages() * spec.shards());
    for ([[maybe_unused]] const PoolExtent& extent : batch.buffers) {
      assert(extent.bytes >= spec.shard_bytes());
      assert(extent.offset.value <= shared_.pool.bytes &&
             extent.bytes <= shared_.pool.bytes - extent.offset.value);
    }
  }

  StorageSink& sink_;
  Counters counters_;
  Batches batches_;
  Shared shared_;
  std::vector<std::unique_ptr<Worker>> workers_;  // last: they end first and use the rest
};

}  // namespace
}  // namespace redis

Result<std::unique_ptr<StorageBackend>> make_redis_backend(const nlohmann::ordered_json& settings,
                                                           const StoragePool& pool, StorageSink& sink) {
  if (!checksums_available()) {
    return Error{Status::invalid_argument,
                 "this hicached was built without xxHash, which the checksums of the redis backend need", 0};
  }
  auto parsed = redis::parse_settings(settings);
  if (!parsed) return parsed.error();
  auto backend = std::make_unique<redis::RedisBackend>(std::move(*parsed), pool, sink);
  if (auto started = backend->start(); !started) {
    return Error{Status::invalid_argument, "redis: " + started.error().message, started.error().system_errno};
  }
  return std::unique_ptr<StorageBackend>(std::move(backend));
}

}  // namespace hicache::daemon
