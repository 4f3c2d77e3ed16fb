#include "daemon/storage/memory_backend.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/config_keys.hpp"
#include "shm/clock.hpp"

namespace hicache::daemon {
namespace {

using Settings = nlohmann::ordered_json;

struct MemorySettings {
  std::uint64_t capacity_bytes = 0;  // 0 = no bound
  std::uint64_t delay_us = 0;        // of each page, for get and put
  std::uint64_t threads = 1;
  std::uint64_t fail_get_every = 0;     // every so many pages of a get end with system_error; 0 = none
  std::uint64_t fail_put_every = 0;     // likewise of a put
  std::uint64_t corrupt_get_every = 0;  // every so many pages of a get are dropped as damaged
  std::string stall_while;              // while this file exists, pages wait in the middle of their operation
};

Result<MemorySettings> read_settings(const Settings& settings) {
  MemorySettings out;
  struct Number {
    const char* name;
    std::uint64_t* value;
    std::uint64_t low, high;
  };
  constexpr std::uint64_t kAny = std::numeric_limits<std::uint64_t>::max();
  const std::array<Number, 6> numbers{{{"capacity_bytes", &out.capacity_bytes, 0, kAny},
                                       {"delay_us", &out.delay_us, 0, 60'000'000},
                                       {"threads", &out.threads, 1, 64},
                                       {"fail_get_every", &out.fail_get_every, 0, kAny},
                                       {"fail_put_every", &out.fail_put_every, 0, kAny},
                                       {"corrupt_get_every", &out.corrupt_get_every, 0, kAny}}};
  for (const auto& [name, value] : settings.items()) {
    const std::string key = "storage.memory." + name;
    if (name == "stall_while") {
      if (!value.is_string()) {
        return Error{Status::invalid_argument, key + ": found " + value.dump() + ", expected a path", 0};
      }
      out.stall_while = value.get<std::string>();
      continue;
    }
    const Number* number = nullptr;
    std::string known;
    for (const Number& n : numbers) {
      if (name == n.name) number = &n;
      known += std::string(n.name) + ", ";
    }
    if (number == nullptr) {
      return Error{Status::invalid_argument, key + ": unknown key, expected one of " + known + "stall_while",
                   0};
    }
    std::optional<std::uint64_t> n;
    if (value.is_number_unsigned()) n = value.get<std::uint64_t>();
    if (value.is_string() && number->value == &out.capacity_bytes) n = parse_bytes(value.get<std::string>());
    if (!n || *n < number->low || *n > number->high) {
      return Error{Status::invalid_argument,
                   fmt::format("{}: found {}, expected an integer from {} to {}", key, value.dump(),
                               number->low, number->high),
                   0};
    }
    *number->value = *n;
  }
  return out;
}

// Namespace digest and page hash.
using Key = std::pair<std::array<std::uint64_t, 4>, std::array<std::uint64_t, 4>>;

class MemoryBackend : public StorageBackend {
 public:
  MemoryBackend(MemorySettings settings, const StoragePool& pool, StorageSink& sink)
      : settings_(std::move(settings)), pool_(pool), sink_(sink) {
    for (std::uint64_t i = 0; i < settings_.threads; ++i) threads_.emplace_back([this] { run(); });
  }
  ~MemoryBackend() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  [[nodiscard]] std::string_view name() const override { return "memory"; }
  void submit(StorageBatch batch) override {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back({std::move(batch), false});
    }
    changed_.notify_one();
  }
  void cancel(StorageBatchId batch) override {
    const std::lock_guard lock(mutex_);
    for (Work& work : queue_) {
      if (work.batch.id == batch) work.cancelled = true;
    }
    for (Work* work : running_) {
      if (work->batch.id == batch) work->cancelled = true;
    }
  }
  Outcome clear() override {
    const std::lock_guard lock(mutex_);
    pages_.clear();
    order_.clear();
    stats_.pages = stats_.bytes = 0;
    return success();
  }
  [[nodiscard]] StorageHealth health() const override {
    const std::lock_guard lock(mutex_);
    return {true,
            fmt::format("{} pages, {} in the daemon's memory", stats_.pages, format_bytes(stats_.bytes))};
  }
  [[nodiscard]] StorageStats stats() const override {
    const std::lock_guard lock(mutex_);
    StorageStats stats = stats_;
    stats.capacity_bytes = settings_.capacity_bytes;
    return stats;
  }

 private:
  struct Work {
    StorageBatch batch;
    bool cancelled = false;
  };
  using Bytes = std::shared_ptr<const std::vector<std::byte>>;

  void run() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      Work work = std::move(queue_.front());
      queue_.pop_front();
      running_.push_back(&work);
      lock.unlock();
      for (std::uint32_t page = 0; page < work.batch.pages(); ++page) {
        Status outcome = Status::internal;
        try {
          outcome = serve(work, page);
        } catch (const std::exception& e) {
          // Out of memory: a page that is not kept, no reason to end.
          spdlog::warn("memory storage: {}: {}", to_string(work.batch.operation), e.what());
          outcome = Status::no_space;
        }
        sink_.page(work.batch.id, page, outcome);
      }
      lock.lock();
      std::erase(running_, &work);
      lock.unlock();
      sink_.ended(work.batch.id);
    }
  }

  Status serve(const Work& work, std::uint32_t page) {
    const StorageBatch& batch = work.batch;
    {
      const std::lock_guard lock(mutex_);
      if (work.cancelled || stopping_) return Status::closed;
    }
    if (batch.deadline_ns != 0 && monotonic_ns() > batch.deadline_ns) return Status::timed_out;
    pretend_a_medium(batch.operation);
    const Key key{batch.ns->digest.words, batch.hashes[page].words};
    switch (batch.operation) {
      case StorageOperation::exists: {
        const std::lock_guard lock(mutex_);
        return pages_.contains(key) ? Status::ok : Status::not_found;
      }
      case StorageOperation::get:
        return get(key, batch, page);
      case StorageOperation::put:
        return put(key, batch, page);
    }
    return Status::internal;
  }

  void pretend_a_medium(StorageOperation operation) {
    if (settings_.delay_us > 0 && operation != StorageOperation::exists) {
      std::this_thread::sleep_for(std::chrono::microseconds(settings_.delay_us));
    }
    while (!settings_.stall_while.empty() && ::access(settings_.stall_while.c_str(), F_OK) == 0) {
      {
        const std::lock_guard lock(mutex_);
        if (stopping_) return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  Status get(const Key& key, const StorageBatch& batch, std::uint32_t page) {
    Bytes bytes;
    {
      const std::lock_guard lock(mutex_);
      ++gets_;
      if (settings_.fail_get_every != 0 && gets_ % settings_.fail_get_every == 0) {
        ++stats_.failed_operations;
        return Status::system_error;
      }
      const auto found = pages_.find(key);
      if (found == pages_.end()) return Status::not_found;
      if (settings_.corrupt_get_every != 0 && gets_ % settings_.corrupt_get_every == 0) {
        ++stats_.corrupt_pages;
        drop(found);
        return Status::corrupt;
      }
      bytes = found->second;
    }
    const std::uint64_t shard_bytes = batch.ns->spec.shard_bytes();
    const auto buffers = batch.buffers_of(page);
    if (bytes->size() != shard_bytes * buffers.size()) return Status::corrupt;
    for (std::size_t shard = 0; shard < buffers.size(); ++shard) {
      std::memcpy(pool_.at(buffers[shard]).data(), bytes->data() + shard * shard_bytes, shard_bytes);
    }
    return Status::ok;
  }

  Status put(const Key& key, const StorageBatch& batch, std::uint32_t page) {
    {
      const std::lock_guard lock(mutex_);
      ++puts_;
      if (settings_.fail_put_every != 0 && puts_ % settings_.fail_put_every == 0) {
        ++stats_.failed_operations;
        return Status::system_error;
      }
      if (pages_.contains(key)) return Status::ok;
    }
    const std::uint64_t shard_bytes = batch.ns->spec.shard_bytes();
    const auto buffers = batch.buffers_of(page);
    if (settings_.capacity_bytes != 0 && shard_bytes * buffers.size() > settings_.capacity_bytes) {
      return Status::no_space;
    }
    auto bytes = std::make_shared<std::vector<std::byte>>(shard_bytes * buffers.size());
    for (std::size_t shard = 0; shard < buffers.size(); ++shard) {
      std::memcpy(bytes->data() + shard * shard_bytes, pool_.at(buffers[shard]).data(), shard_bytes);
    }
    const std::lock_guard lock(mutex_);
    while (settings_.capacity_bytes != 0 && stats_.bytes + bytes->size() > settings_.capacity_bytes) {
      const auto oldest = pages_.find(order_.front());
      order_.pop_front();
      if (oldest == pages_.end()) continue;  // dropped as damaged
      drop(oldest);
      ++stats_.evicted_pages;
    }
    const auto [place, fresh] = pages_.emplace(key, std::move(bytes));
    if (!fresh) return Status::ok;
    ++stats_.pages;
    stats_.bytes += place->second->size();
    order_.push_back(key);
    return Status::ok;
  }

  void drop(std::map<Key, Bytes>::iterator page) {
    --stats_.pages;
    stats_.bytes -= page->second->size();
    pages_.erase(page);
  }

  const MemorySettings settings_;
  const StoragePool pool_;
  StorageSink& sink_;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool stopping_ = false;
  std::deque<Work> queue_;
  std::vector<Work*> running_;
  std::map<Key, Bytes> pages_;
  std::deque<Key> order_;  // oldest first; may name pages that are gone
  StorageStats stats_;
  std::uint64_t gets_ = 0;
  std::uint64_t puts_ = 0;
  std::vector<std::thread> threads_;
};

}  // namespace

Result<std::unique_ptr<StorageBackend>> make_memory_backend(const Settings& settings, const StoragePool& pool,
                                                            StorageSink& sink) {
  auto read = read_settings(settings);
  if (!read) return read.error();
  return std::unique_ptr<StorageBackend>(std::make_unique<MemoryBackend>(std::move(*read), pool, sink));
}

}  // namespace hicache::daemon
