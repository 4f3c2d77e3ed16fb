#include "daemon/storage/file/sglang_backend.hpp"

#include <spdlog/spdlog.h>

#include <atomic>
#include <cassert>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/storage/file/page_queue.hpp"
#include "daemon/storage/file/sglang_binding.hpp"
#include "daemon/storage/file/sglang_files.hpp"
#include "daemon/storage/file/sglang_space.hpp"
#include "shm/clock.hpp"
#include "shm/page_keys.hpp"

namespace hicache::daemon {
namespace {

constexpr std::size_t kMaxPutPages = 8192;          // waiting
constexpr std::chrono::milliseconds kBusyTurn{20};  // the keeper looks at deadlines so often while pages wait
constexpr std::chrono::milliseconds kIdleTurn{500};  // and at the space

// Pages by threads that block: what costs here is to create, sync and rename files, which no engine does
// better.
class SglangBackend final : public StorageBackend {
 public:
  SglangBackend(const FileSettings& settings, std::unique_ptr<SglangFiles> files, const StoragePool& pool,
                StorageSink& sink)
      : settings_(settings),
        pool_(pool),
        files_(std::move(files)),
        queue_(sink, kMaxPutPages),
        binding_(settings_.sglang, *files_),
        space_(settings_, *files_) {
    for (std::uint32_t i = 0; i < settings_.sglang.threads; ++i) {
      threads_.emplace_back([this] { guarded([this] { serve(); }); });
    }
    // Not one of those: they may all hang in a disk that stalls.
    threads_.emplace_back([this] { guarded([this] { keep(); }); });
  }
  ~SglangBackend() override {
    queue_.close();
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    queue_.sweep(monotonic_ns());
  }

  [[nodiscard]] std::string_view name() const override { return "file"; }
  void submit(StorageBatch batch) override {
    queue_.accept(std::move(batch));
    changed();
  }
  void cancel(StorageBatchId batch) override {
    queue_.cancel(batch);
    changed();
  }
  // Until the keeper has removed the files nothing is found and nothing is kept.
  Outcome clear() override {
    clearing_.store(true, std::memory_order_release);  // SYNC sglang-clear
    changed();
    return success();
  }
  [[nodiscard]] StorageHealth health() const override {
    StorageHealth health;
    health.text = trouble();
    if (health.text.empty()) health.text = binding_.trouble();
    if (health.text.empty()) health.text = "SGLang's page files in " + files_->path();
    return health;
  }
  [[nodiscard]] StorageStats stats() const override {
    StorageStats stats;
    stats.bytes = space_.used_bytes();
    stats.capacity_bytes = settings_.capacity_bytes;
    stats.evicted_pages = space_.evicted_files();
    stats.corrupt_pages = corrupt_pages_.load(std::memory_order_relaxed);
    stats.failed_operations = failed_operations_.load(std::memory_order_relaxed);
    return stats;
  }

 private:
  void changed() {
    {
      const std::lock_guard lock(mutex_);
      ++changes_;
    }
    changed_.notify_all();
  }

  template <class Body>
  void guarded(Body&& body) {
    for (;;) {
      try {
        return body();
      } catch (const std::exception& e) {
        spdlog::error("storage: {}", e.what());
      }
    }
  }

  // Until stop: `body` again and again, asleep when it has found nothing to do.
  template <class Body>
  void loop(Body&& body) {
    std::unique_lock lock(mutex_);
    while (!stop_) {
      const std::uint64_t seen = changes_;
      lock.unlock();
      const std::chrono::milliseconds pause = body();
      lock.lock();
      if (pause.count() > 0) changed_.wait_for(lock, pause, [&] { return stop_ || changes_ != seen; });
    }
  }

  void serve() {
    loop([this] {
      for (const StorageOperation operation :
           {StorageOperation::exists, StorageOperation::get, StorageOperation::put}) {
        if (const auto page = queue_.take(operation, monotonic_ns())) {
          queue_.finish(*page, outcome_of(*page, operation));
          return std::chrono::milliseconds(0);
        }
      }
      return kIdleTurn;
    });
  }

  void keep() {
    loop([this] {
      queue_.sweep(monotonic_ns());
      if (clearing_.load(std::memory_order_acquire)) {  // SYNC sglang-clear
        space_.clear();
        binding_.forget();
        clearing_.store(false, std::memory_order_release);
      }
      space_.keep();
      return queue_.waiting() ? kBusyTurn : kIdleTurn;
    });
  }

  // SYNC sglang-clear: store (release) of true -> load (acquire) here and in the keeper; of false, after the
  // files
  //   are gone, likewise. Weaker: a page of before the clear could be found after it.
  Status outcome_of(const QueuedPage& page, StorageOperation operation) {
    try {
      const bool clearing = clearing_.load(std::memory_order_acquire);
      if (clearing || !binding_.admits(page.ns())) {
        return operation == StorageOperation::put ? Status::dropped : Status::not_found;
      }
      switch (operation) {
        case StorageOperation::exists:
          return exists(page);
        case StorageOperation::get:
          return get(page);
        case StorageOperation::put:
          return put(page);
      }
    } catch (const std::exception& e) {  // memory
      spdlog::error("storage: {}", e.what());
    }
    return Status::internal;
  }

  [[nodiscard]] std::string file_of(const QueuedPage& page, std::uint32_t shard) const {
    const NamespaceSpec& spec = page.ns().spec;
    KeyOwner owner;
    owner.model = settings_.sglang.model;
    owner.attention = spec.attention;
    owner.tp_rank = shard;
    owner.tp_size = spec.tp_size;
    owner.pp_rank = settings_.sglang.pp_rank;
    owner.pp_size = settings_.sglang.pp_size;
    return file_key(page.hash(), owner);
  }

  // A file of another size is somebody's unfinished one: not there yet.
  Status exists(const QueuedPage& page) {
    const NamespaceSpec& spec = page.ns().spec;
    for (std::uint32_t shard = 0; shard < spec.shards(); ++shard) {
      if (files_->look(file_of(page, shard), spec.shard_bytes()) != Status::ok) return Status::not_found;
    }
    return Status::ok;
  }

  Status get(const QueuedPage& page) {
    const NamespaceSpec& spec = page.ns().spec;
    for (std::uint32_t shard = 0; shard < spec.shards(); ++shard) {
      const std::string name = file_of(page, shard);
      int error = 0;
      const Status status = files_->read(name, spec, pool_.at(page.buffers()[shard]), error);
      if (status == Status::corrupt) corrupt_pages_.fetch_add(1, std::memory_order_relaxed);
      if (error != 0) note_error(error);
      if (status != Status::ok) return status;
      if (space_.limited()) files_->touch(name);
    }
    return Status::ok;
  }

  Status put(const QueuedPage& page) {
    const NamespaceSpec& spec = page.ns().spec;
    for (std::uint32_t shard = 0; shard < spec.shards(); ++shard) {
      const std::string name = file_of(page, shard);
      if (files_->look(name, spec.shard_bytes()) == Status::ok) continue;
      if (!space_.take(spec.shard_bytes())) return Status::no_space;
      int error = 0;
      const SglangSpace::Settling settling(space_, spec.shard_bytes());
      const Status status = files_->write(name, spec, pool_.at(page.buffers()[shard]), error);
      if (error != 0) note_error(error);
      if (status != Status::ok) return status;
    }
    errors_.store(0, std::memory_order_relaxed);
    return Status::ok;
  }

  void note_error(int error) {
    failed_operations_.fetch_add(1, std::memory_order_relaxed);
    last_error_.store(error, std::memory_order_relaxed);
    if (errors_.fetch_add(1, std::memory_order_relaxed) == 0) {
      spdlog::warn("storage: {}: {}", files_->path(), std::strerror(error));
    }
  }
  [[nodiscard]] std::string trouble() const {
    if (errors_.load(std::memory_order_relaxed) == 0) return "";
    return files_->path() + ": " + std::strerror(last_error_.load(std::memory_order_relaxed));
  }

  const FileSettings settings_;
  const StoragePool pool_;
  const std::unique_ptr<SglangFiles> files_;
  PageQueue queue_;
  SglangBinding binding_;
  SglangSpace space_;
  std::atomic<bool> clearing_{false};
  // Relaxed, all of them: counters for people.
  std::atomic<std::uint64_t> corrupt_pages_{0};
  std::atomic<std::uint64_t> failed_operations_{0};
  std::atomic<std::uint32_t> errors_{0};  // since the last put that went well
  std::atomic<int> last_error_{0};

  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t changes_ = 0;
  bool stop_ = false;
  std::vector<std::thread> threads_;  // last: they use all of the above
};

}  // namespace

Result<std::unique_ptr<StorageBackend>> make_sglang_backend(const FileSettings& settings,
                                                            const StoragePool& pool, StorageSink& sink) {
  auto files = SglangFiles::open(settings.directories.front(), settings.sglang.layout);
  if (!files) return files.error();
  return std::unique_ptr<StorageBackend>(
      std::make_unique<SglangBackend>(settings, std::move(*files), pool, sink));
}

}  // namespace hicache::daemon
