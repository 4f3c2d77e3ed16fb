// A storage backend without a daemon: pool pages in private memory, and a sink that keeps what it is told and
// notices every breach of the backend's contract.
#pragma once

#include <sys/mman.h>

#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "daemon/storage/backend.hpp"
#include "daemon/storage/backend_factory.hpp"
#include "shm/clock.hpp"
#include "shm/prefix_hash.hpp"
#include "tests/support/processes.hpp"

namespace hicache::test {

class RecordingSink : public daemon::StorageSink {
 public:
  void page(daemon::StorageBatchId batch, std::uint32_t page, Status outcome) override {
    const std::lock_guard lock(mutex_);
    Batch& b = batches_[batch.value];
    if (b.ended) breaches_.push_back("a page after the end of its batch");
    if (!b.outcomes.emplace(page, outcome).second) breaches_.push_back("two outcomes of one page");
    news_.notify_all();
  }
  void ended(daemon::StorageBatchId batch) override {
    const std::lock_guard lock(mutex_);
    Batch& b = batches_[batch.value];
    if (b.ended) breaches_.push_back("a batch that ended twice");
    b.ended = true;
    news_.notify_all();
  }
  // The outcomes by page, once the batch has ended; nothing when it does not.
  std::optional<std::vector<Status>> outcomes(daemon::StorageBatchId batch, int timeout_ms = kPatienceMs) {
    std::unique_lock lock(mutex_);
    const bool ended = news_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                                      [&] { return batches_[batch.value].ended; });
    if (!ended) return std::nullopt;
    std::vector<Status> list;
    for (const auto& [page, outcome] : batches_[batch.value].outcomes) list.push_back(outcome);
    return list;
  }
  std::vector<std::string> breaches() {
    const std::lock_guard lock(mutex_);
    return breaches_;
  }

 private:
  struct Batch {
    std::map<std::uint32_t, Status> outcomes;
    bool ended = false;
  };
  std::mutex mutex_;
  std::condition_variable news_;
  std::map<std::uint64_t, Batch> batches_;
  std::vector<std::string> breaches_;
};

// Pool memory in which page i's slot begins at i * slot, filled with a canary between the payloads.
class BackendRig {
 public:
  static constexpr std::uint8_t kCanary = 0xc5;

  // A namespace of two shards of `layers` KiB each.
  static NamespaceSpec spec_of(std::uint32_t layers = 2, const std::string& model = "model") {
    NamespaceSpec spec;
    spec.model = model;
    spec.dtype = "bfloat16";
    spec.page_tokens = 16;
    spec.layers = layers;
    spec.heads_per_shard = 1;
    spec.head_dim = 16;
    spec.element_bytes = 2;
    spec.tp_size = 2;
    return spec;
  }

  explicit BackendRig(const NamespaceSpec& spec = spec_of(), std::uint32_t pages = 128)
      : ns_(std::make_shared<const daemon::StorageNamespace>(daemon::StorageNamespace{spec.digest(), spec})),
        pages_(pages) {
    pool_.bytes = spec.slot_bytes() * pages;
    pool_.segment_bytes = pool_.bytes;
    void* memory = ::mmap(nullptr, pool_.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("no memory for the pool");
    pool_.base = static_cast<std::byte*>(memory);
    std::memset(memory, kCanary, pool_.bytes);
  }
  ~BackendRig() {
    backend_.reset();
    ::munmap(pool_.base, pool_.bytes);
  }
  BackendRig(const BackendRig&) = delete;
  BackendRig& operator=(const BackendRig&) = delete;

  void attach(const std::string& name, const nlohmann::ordered_json& settings) {
    auto made = daemon::make_storage_backend(name, settings, pool_, sink_);
    if (!made) throw std::runtime_error(made.error().message);
    backend_ = std::move(*made);
  }
  void detach() { backend_.reset(); }
  [[nodiscard]] daemon::StorageBackend& backend() { return *backend_; }
  [[nodiscard]] RecordingSink& sink() { return sink_; }
  [[nodiscard]] const daemon::StorageNamespace& ns() const { return *ns_; }
  [[nodiscard]] const daemon::StoragePool& pool() const { return pool_; }

  // Key of page number n; page n of one rig is page n of every rig.
  [[nodiscard]] static PrefixHash hash(std::uint32_t n) {
    const std::vector<std::uint32_t> tokens{n};
    return hash_page(tokens, std::nullopt);
  }

  // Payload of page n in slot n: words that tell page, shard and place.
  void fill(std::uint32_t n, std::uint64_t salt = 0) {
    for_words(n, [&](std::uint64_t& word, std::uint64_t tag) { word = tag + salt; });
  }
  [[nodiscard]] bool holds(std::uint32_t slot, std::uint32_t n, std::uint64_t salt = 0) {
    bool good = true;
    for_words(slot, [&](std::uint64_t& word, std::uint64_t tag) {
      good = good && word == tag - (std::uint64_t{slot} << 40) + (std::uint64_t{n} << 40) + salt;
    });
    return good;
  }
  void wipe() { std::memset(pool_.base, kCanary, pool_.bytes); }
  // Nothing was written to the slots from `first` on.
  [[nodiscard]] bool untouched(std::uint32_t first, std::uint32_t count) const {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(pool_.base);
    const std::uint64_t slot = ns_->spec.slot_bytes();
    for (std::uint64_t i = first * slot; i < (first + count) * slot; ++i) {
      if (bytes[i] != kCanary) return false;
    }
    return true;
  }
  // Nothing was written between the payloads.
  [[nodiscard]] bool padding_intact() const {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(pool_.base);
    const NamespaceSpec& spec = ns_->spec;
    for (std::uint64_t at = 0; at < pool_.bytes; at += spec.shard_stride()) {
      for (std::uint64_t i = spec.shard_bytes(); i < spec.shard_stride(); ++i) {
        if (bytes[at + i] != kCanary) return false;
      }
    }
    return true;
  }

  // Submits pages first .. first + count - 1, each in the slot of its number.
  daemon::StorageBatchId submit(daemon::StorageOperation operation, std::uint32_t first, std::uint32_t count,
                                std::uint64_t deadline_ns = 0) {
    daemon::StorageBatch batch;
    batch.id = {++last_id_};
    batch.operation = operation;
    batch.ns = ns_;
    batch.deadline_ns = deadline_ns;
    for (std::uint32_t n = first; n < first + count; ++n) {
      batch.hashes.push_back(hash(n));
      if (operation == daemon::StorageOperation::exists) continue;
      for (std::uint32_t shard = 0; shard < ns_->spec.shards(); ++shard) {
        batch.buffers.push_back({PoolOffset{n * ns_->spec.slot_bytes() + shard * ns_->spec.shard_stride()},
                                 ns_->spec.shard_stride()});
      }
    }
    const daemon::StorageBatchId id = batch.id;
    backend_->submit(std::move(batch));
    return id;
  }
  // Submits and waits. Empty when the batch did not end.
  std::vector<Status> run(daemon::StorageOperation operation, std::uint32_t first, std::uint32_t count,
                          std::uint64_t deadline_ns = 0) {
    return sink_.outcomes(submit(operation, first, count, deadline_ns)).value_or(std::vector<Status>{});
  }
  std::vector<Status> exists(std::uint32_t first, std::uint32_t count) {
    return run(daemon::StorageOperation::exists, first, count);
  }
  std::vector<Status> get(std::uint32_t first, std::uint32_t count) {
    return run(daemon::StorageOperation::get, first, count);
  }
  std::vector<Status> put(std::uint32_t first, std::uint32_t count) {
    return run(daemon::StorageOperation::put, first, count);
  }

 private:
  template <class Body>
  void for_words(std::uint32_t slot, Body body) {
    const NamespaceSpec& spec = ns_->spec;
    for (std::uint64_t shard = 0; shard < spec.shards(); ++shard) {
      auto* words = reinterpret_cast<std::uint64_t*>(pool_.base + slot * spec.slot_bytes() +
                                                     shard * spec.shard_stride());
      for (std::uint64_t i = 0; i < spec.shard_bytes() / 8; ++i) {
        body(words[i], (std::uint64_t{slot} << 40) + (shard << 32) + i);
      }
    }
  }

  std::shared_ptr<const daemon::StorageNamespace> ns_;
  std::uint32_t pages_;
  daemon::StoragePool pool_;
  RecordingSink sink_;
  std::uint64_t last_id_ = 0;
  std::unique_ptr<daemon::StorageBackend> backend_;  // last: it ends first
};

}  // namespace hicache::test
