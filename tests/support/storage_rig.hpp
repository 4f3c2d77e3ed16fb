// What tests of storage backends share: a pool, a sink that watches the contract of backend.hpp, and pages
// whose bytes say which page they are.
#pragma once

#include <sys/mman.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "daemon/storage/backend_factory.hpp"
#include "shm/clock.hpp"
#include "shm/prefix_hash.hpp"
#include "tests/support/processes.hpp"

namespace hicache::test {

using daemon::PoolExtent;
using daemon::StorageBackend;
using daemon::StorageBatch;
using daemon::StorageBatchId;
using daemon::StorageNamespace;
using daemon::StorageOperation;
using daemon::StoragePool;

// Remembers outcomes. A breach of the contract is a fault of its own, which the rig's end reports.
class WatchingSink final : public daemon::StorageSink {
 public:
  void expect(StorageBatchId id, std::size_t pages) {
    const std::lock_guard lock(mutex_);
    batches_[id.value].outcomes.assign(pages, kNone);
  }
  void page(StorageBatchId id, std::uint32_t page, Status outcome) override {
    const std::lock_guard lock(mutex_);
    Batch& b = batches_[id.value];
    if (b.ended) fault("page after ended");
    if (page >= b.outcomes.size()) return fault("page that is not in the batch");
    if (b.outcomes[page] != kNone) fault("second outcome of a page");
    b.outcomes[page] = outcome;
    changed_.notify_all();
  }
  void ended(StorageBatchId id) override {
    const std::lock_guard lock(mutex_);
    Batch& b = batches_[id.value];
    if (b.ended) fault("second ended");
    for (const Status s : b.outcomes) {
      if (s == kNone) fault("ended before every page had an outcome");
    }
    b.ended = true;
    changed_.notify_all();
  }
  // Outcomes of a batch, once it has ended. Throws when it does not.
  std::vector<Status> wait(StorageBatchId id) {
    std::unique_lock lock(mutex_);
    Batch& b = batches_[id.value];
    if (!changed_.wait_for(lock, std::chrono::milliseconds(kPatienceMs), [&] { return b.ended; })) {
      throw std::runtime_error("batch " + std::to_string(id.value) + " has not ended");
    }
    return b.outcomes;
  }
  [[nodiscard]] bool has_ended(StorageBatchId id) {
    const std::lock_guard lock(mutex_);
    return batches_[id.value].ended;
  }
  [[nodiscard]] std::string faults() const {
    const std::lock_guard lock(mutex_);
    return faults_;
  }

 private:
  static constexpr Status kNone = static_cast<Status>(0xffff);
  struct Batch {
    std::vector<Status> outcomes;
    bool ended = false;
  };
  void fault(const std::string& text) { faults_ += text + "; "; }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uint64_t, Batch> batches_;
  std::string faults_;
};

// A namespace of pages with that many shards and bytes in each; `model` makes it another one.
inline std::shared_ptr<const StorageNamespace> storage_namespace(std::uint64_t shard_bytes,
                                                                 std::uint32_t shards = 1,
                                                                 const std::string& model = "test/model") {
  NamespaceSpec spec;
  spec.model = model;
  spec.dtype = "bytes";
  spec.attention = shards == 1 ? Attention::mla : Attention::mha;
  spec.tp_size = shards;
  spec.page_tokens = 1;
  spec.layers = 1;
  spec.heads_per_shard = 1;
  spec.element_bytes = 1;
  spec.head_dim = static_cast<std::uint32_t>(shard_bytes / spec.kinds());
  return std::make_shared<StorageNamespace>(StorageNamespace{spec.digest(), spec});
}

inline PrefixHash storage_hash(std::uint64_t page) {
  const std::uint32_t tokens[2] = {static_cast<std::uint32_t>(page), static_cast<std::uint32_t>(page >> 32)};
  return hash_page(tokens, std::nullopt);
}

// Byte `at` of shard `shard` of page `page`.
inline std::uint8_t storage_byte(std::uint64_t page, std::uint64_t shard, std::uint64_t at) {
  const std::uint64_t word =
      (page * 0x9e3779b97f4a7c15ull) ^ (shard << 40) ^ (at / 8 * 0xc2b2ae3d27d4eb4full);
  return static_cast<std::uint8_t>((word ^ word >> 29) >> (at % 8 * 8));
}

// A pool of anonymous memory, and batches of pages that lie in it one behind the other from slot 0.
class StorageRig {
 public:
  explicit StorageRig(std::uint64_t pool_bytes = 32 * kMiB) {
    void* memory = ::mmap(nullptr, pool_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    pool_ = {static_cast<std::byte*>(memory), pool_bytes, pool_bytes};
  }
  ~StorageRig() {
    backend_.reset();
    ::munmap(pool_.base, pool_.bytes);
  }
  StorageRig(const StorageRig&) = delete;
  StorageRig& operator=(const StorageRig&) = delete;

  // The error's text, "" = made.
  std::string make(const std::string& name, const nlohmann::ordered_json& settings) {
    backend_.reset();
    auto made = daemon::make_storage_backend(name, settings, pool_, sink_);
    if (!made) return made.error().message;
    backend_ = std::move(*made);
    return "";
  }
  void close() { backend_.reset(); }
  [[nodiscard]] StorageBackend& backend() { return *backend_; }
  [[nodiscard]] WatchingSink& sink() { return sink_; }
  [[nodiscard]] const StoragePool& pool() const { return pool_; }

  // The extents of a page whose slot is `slot`; shards lie `gap` bytes apart.
  [[nodiscard]] static std::vector<PoolExtent> extents(const StorageNamespace& ns, std::uint64_t slot,
                                                       std::uint64_t gap = 0) {
    std::vector<PoolExtent> out;
    const std::uint64_t stride = ns.spec.shard_stride() + gap;
    for (std::uint32_t s = 0; s < ns.spec.shards(); ++s) {
      out.push_back({PoolOffset{(slot * ns.spec.shards() + s) * stride}, ns.spec.shard_stride()});
    }
    return out;
  }
  void fill(const StorageNamespace& ns, std::uint64_t page, const std::vector<PoolExtent>& at) {
    for (std::size_t s = 0; s < at.size(); ++s) {
      const auto bytes = pool_.at(at[s]);
      std::memset(bytes.data(), 0xee, bytes.size());  // padding carries no meaning
      for (std::uint64_t i = 0; i < ns.spec.shard_bytes(); ++i)
        bytes[i] = std::byte{storage_byte(page, s, i)};
    }
  }
  [[nodiscard]] bool holds(const StorageNamespace& ns, std::uint64_t page,
                           const std::vector<PoolExtent>& at) {
    for (std::size_t s = 0; s < at.size(); ++s) {
      const auto bytes = pool_.at(at[s]);
      for (std::uint64_t i = 0; i < ns.spec.shard_bytes(); ++i) {
        if (bytes[i] != std::byte{storage_byte(page, s, i)}) return false;
      }
    }
    return true;
  }

  // Submits pages; their buffers are the slots 0, 1, ... and are filled for a put, wiped for a get.
  StorageBatchId submit(StorageOperation operation, const std::shared_ptr<const StorageNamespace>& ns,
                        const std::vector<std::uint64_t>& pages, std::uint64_t deadline_ns = 0,
                        std::uint64_t gap = 0, std::uint64_t first_slot = 0) {
    StorageBatch batch;
    batch.id = StorageBatchId{++last_id_};
    batch.operation = operation;
    batch.ns = ns;
    batch.deadline_ns = deadline_ns;
    for (std::size_t i = 0; i < pages.size(); ++i) {
      batch.hashes.push_back(storage_hash(pages[i]));
      if (operation == StorageOperation::exists) continue;
      const auto at = extents(*ns, first_slot + i, gap);
      if (operation == StorageOperation::put) fill(*ns, pages[i], at);
      if (operation == StorageOperation::get) {
        for (const PoolExtent& e : at) std::memset(pool_.at(e).data(), 0, e.bytes);
      }
      batch.buffers.insert(batch.buffers.end(), at.begin(), at.end());
    }
    sink_.expect(batch.id, pages.size());
    const StorageBatchId id = batch.id;
    backend_->submit(std::move(batch));
    return id;
  }
  std::vector<Status> run(StorageOperation operation, const std::shared_ptr<const StorageNamespace>& ns,
                          const std::vector<std::uint64_t>& pages, std::uint64_t gap = 0) {
    return sink_.wait(submit(operation, ns, pages, 0, gap));
  }

  // What a get of these pages gave, by outcome; `wrong` are those that were ok with other bytes.
  struct Got {
    std::size_t ok = 0;
    std::size_t missing = 0;  // not_found
    std::size_t corrupt = 0;
    std::size_t other = 0;
    std::size_t wrong = 0;
  };
  Got get(const std::shared_ptr<const StorageNamespace>& ns, const std::vector<std::uint64_t>& pages,
          std::uint64_t gap = 0) {
    Got got;
    const auto outcomes = run(StorageOperation::get, ns, pages, gap);
    for (std::size_t i = 0; i < pages.size(); ++i) {
      got.ok += outcomes[i] == Status::ok;
      got.missing += outcomes[i] == Status::not_found;
      got.corrupt += outcomes[i] == Status::corrupt;
      got.other +=
          outcomes[i] != Status::ok && outcomes[i] != Status::not_found && outcomes[i] != Status::corrupt;
      got.wrong += outcomes[i] == Status::ok && !holds(*ns, pages[i], extents(*ns, i, gap));
    }
    return got;
  }
  // Puts pages in batches of 16, one after the other; how many were kept.
  std::size_t put(const std::shared_ptr<const StorageNamespace>& ns, std::uint64_t first,
                  std::uint64_t count) {
    std::size_t kept = 0;
    for (std::uint64_t at = first; at < first + count; at += 16) {
      std::vector<std::uint64_t> pages;
      for (std::uint64_t p = at; p < std::min(at + 16, first + count); ++p) pages.push_back(p);
      for (const Status s : run(StorageOperation::put, ns, pages)) kept += s == Status::ok;
    }
    return kept;
  }

 private:
  StoragePool pool_;
  WatchingSink sink_;
  std::unique_ptr<StorageBackend> backend_;
  std::uint64_t last_id_ = 0;
};

inline std::vector<std::uint64_t> numbers(std::uint64_t first, std::uint64_t count) {
  std::vector<std::uint64_t> out;
  for (std::uint64_t i = 0; i < count; ++i) out.push_back(first + i);
  return out;
}

}  // namespace hicache::test
