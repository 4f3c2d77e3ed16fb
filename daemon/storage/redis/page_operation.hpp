// A page of a batch on its way through the backend, and the batch that its outcome belongs to.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "daemon/storage/backend.hpp"
#include "daemon/storage/redis/endpoint.hpp"
#include "daemon/storage/redis/record.hpp"

namespace hicache::daemon::redis {

// Counters of the whole backend. Relaxed everywhere: figures for people, nothing is decided by them.
struct Counters {
  std::atomic<std::uint64_t> corrupt_pages{0};
  std::atomic<std::uint64_t> failed_operations{0};
};

class Batches;

// A batch that has pages without an outcome. Thread safety: any thread.
class BatchProgress {
 public:
  BatchProgress(StorageBatch batch, Batches& home, StorageSink& sink, Counters& counters)
      : batch_(std::move(batch)), home_(home), sink_(sink), counters_(counters), open_(batch_.pages()) {}

  [[nodiscard]] const StorageBatch& batch() const { return batch_; }
  // Relaxed: a hint that a worker looks at before it begins a page.
  void cancel() { cancelled_.store(true, std::memory_order_relaxed); }
  [[nodiscard]] bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }
  [[nodiscard]] bool expired(std::uint64_t now) const {
    return batch_.deadline_ns != 0 && now >= batch_.deadline_ns;
  }
  // Reports a page; with the last one, that the batch has ended. Once a page.
  void end_page(std::uint32_t page, Status outcome);

 private:
  StorageBatch batch_;
  Batches& home_;
  StorageSink& sink_;
  Counters& counters_;
  // acq_rel in end_page: who takes it to 0 reports `ended`, and must come after every other thread's page().
  std::atomic<std::size_t> open_;
  std::atomic<bool> cancelled_{false};
};

// The batches in flight by id, for cancel. Thread safety: any thread.
class Batches {
 public:
  std::shared_ptr<BatchProgress> add(StorageBatch batch, StorageSink& sink, Counters& counters);
  // False when there is no such batch.
  bool cancel(StorageBatchId id);
  void forget(StorageBatchId id);

 private:
  std::mutex mutex_;
  std::unordered_map<std::uint64_t, std::shared_ptr<BatchProgress>> batches_;
};

// What is asked of the server about a page next. exists: probe. get: read, and drop when it is corrupt. put:
// probe, then write, or touch where pages have a time to live.
enum class Step : std::uint8_t {
  probe,  // STRLEN: there, with the right length?
  read,   // GET
  write,  // SET
  touch,  // PEXPIRE
  drop,   // DEL of what is not our page
};

// "<prefix>:<namespace digest>:<page hash>", both in hex.
std::string page_key(const std::string& prefix, const StorageNamespace& ns, const PrefixHash& hash);

// Owns the duty to report its page: when it goes without finish(), the outcome is system_error, so no error
// path can lose a page.
class PageOperation {
 public:
  PageOperation(std::shared_ptr<BatchProgress> batch, std::uint32_t page, std::string key);
  ~PageOperation() { finish(Status::system_error); }
  PageOperation(const PageOperation&) = delete;
  PageOperation& operator=(const PageOperation&) = delete;

  void finish(Status outcome);

  [[nodiscard]] const StorageBatch& batch() const { return batch_->batch(); }
  [[nodiscard]] StorageOperation kind() const { return batch().operation; }
  [[nodiscard]] bool cancelled() const { return batch_->cancelled(); }
  [[nodiscard]] bool expired(std::uint64_t now) const { return batch_->expired(now); }
  [[nodiscard]] const std::string& key() const { return key_; }
  [[nodiscard]] std::uint16_t slot() const { return slot_; }
  [[nodiscard]] RecordIdentity identity() const { return {*batch().ns, batch().hashes[page_]}; }
  // The payload of each shard.
  [[nodiscard]] std::vector<std::span<std::byte>> payload(const StoragePool& pool) const;

  Step step = Step::probe;
  std::uint8_t redirects = 0;        // that it has followed
  std::optional<Endpoint> asked_at;  // the node that an ASK named, for one command

 private:
  std::shared_ptr<BatchProgress> batch_;  // nullptr once finished
  std::uint32_t page_;
  std::string key_;
  std::uint16_t slot_;
};
using PageOperationPtr = std::unique_ptr<PageOperation>;

}  // namespace hicache::daemon::redis
