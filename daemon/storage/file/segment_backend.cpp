#include "daemon/storage/file/segment_backend.hpp"

#include <fmt/format.h>

#include <utility>
#include <vector>

#include "daemon/config_keys.hpp"
#include "daemon/integrity/shard_checksums.hpp"
#include "daemon/storage/file/directory.hpp"
#include "daemon/storage/file/page_queue.hpp"
#include "daemon/storage/file/segment_keeper.hpp"
#include "daemon/storage/file/segment_store.hpp"
#include "daemon/storage/file/segment_worker.hpp"

namespace hicache::daemon {
namespace {

constexpr std::size_t kMaxPutPages = 8192;  // waiting

class SegmentBackend final : public StorageBackend {
 public:
  SegmentBackend(const FileSettings& settings, std::vector<std::unique_ptr<Directory>> directories,
                 const StoragePool& pool, StorageSink& sink)
      : settings_(settings),
        queue_(sink, kMaxPutPages),
        store_(
            settings_, std::move(directories), [this](std::uint32_t d) { keepers_[d]->poke(); },
            [this] { wake_workers(); }) {
    for (std::uint32_t i = 0; i < settings_.workers; ++i) {
      workers_.push_back(std::make_unique<SegmentWorker>(store_, queue_, pool, settings_));
    }
    for (std::uint32_t d = 0; d < settings_.directories.size(); ++d) {
      keepers_.push_back(std::make_unique<SegmentKeeper>(store_, settings_, d));
    }
  }
  // Pages first, then upkeep: what the last pages leave behind is sealed. Threads wake each other, so all
  // have ended before the first object goes.
  ~SegmentBackend() override {
    queue_.close();
    for (const auto& worker : workers_) worker->stop();
    store_.close_open();
    for (const auto& keeper : keepers_) keeper->stop();
  }

  Outcome open() {
    if (Outcome loaded = store_.load(); !loaded) return loaded;
    for (const auto& worker : workers_) {
      if (Outcome started = worker->start(); !started) return started;
    }
    for (const auto& keeper : keepers_) keeper->start();
    return success();
  }

  [[nodiscard]] std::string_view name() const override { return "file"; }
  void submit(StorageBatch batch) override {
    queue_.accept(std::move(batch));
    wake_workers();
  }
  void cancel(StorageBatchId batch) override {
    queue_.cancel(batch);
    wake_workers();
  }
  Outcome clear() override {
    store_.clear();
    return success();
  }
  [[nodiscard]] StorageHealth health() const override {
    StorageHealth health;
    health.text = store_.trouble(health.usable);
    if (!health.text.empty()) return health;
    const StorageStats now = stats();
    health.text = fmt::format("segment files in {}: {} pages, {} MiB of {}, {}{}",
                              fmt::join(settings_.directories, ", "), now.pages, now.bytes / kMiB,
                              now.capacity_bytes == 0 ? "what is free" : format_bytes(now.capacity_bytes),
                              workers_.front()->engine(), store_.direct() ? "" : ", without O_DIRECT");
    return health;
  }
  [[nodiscard]] StorageStats stats() const override { return store_.stats(); }

 private:
  void wake_workers() {
    for (const auto& worker : workers_) worker->wake();
  }

  const FileSettings settings_;
  PageQueue queue_;
  SegmentStore store_;
  std::vector<std::unique_ptr<SegmentWorker>> workers_;
  std::vector<std::unique_ptr<SegmentKeeper>> keepers_;
};

}  // namespace

Result<std::unique_ptr<StorageBackend>> make_segment_backend(const FileSettings& settings,
                                                             const StoragePool& pool, StorageSink& sink) {
  if (!checksums_available()) {
    return Error{
        Status::invalid_argument,
        "storage.file.format \"segment\" needs a build with xxHash (libxxhash-dev): every page has a "
        "checksum",
        0};
  }
  std::vector<std::unique_ptr<Directory>> directories;
  for (const std::string& path : settings.directories) {
    auto directory = Directory::open(path);
    if (!directory) return directory.error();
    directories.push_back(std::move(*directory));
  }
  auto backend = std::make_unique<SegmentBackend>(settings, std::move(directories), pool, sink);
  if (Outcome opened = backend->open(); !opened) return opened.error();
  return std::unique_ptr<StorageBackend>(std::move(backend));
}

}  // namespace hicache::daemon
