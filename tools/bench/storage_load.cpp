#include "tools/bench/storage_load.hpp"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "daemon/storage/backend_factory.hpp"
#include "shm/prefix_hash.hpp"

namespace hicache::bench {
namespace {

using daemon::kStorageBatchPages;
using daemon::StorageBatch;
using daemon::StorageBatchId;
using daemon::StorageNamespace;
using daemon::StorageOperation;

constexpr std::uint32_t kBatchesInFlight = 4;

std::uint64_t word_of(std::uint64_t page, std::uint64_t block, std::uint64_t round) {
  return (round << 48 ^ page << 20 ^ block) * 0x9e3779b97f4a7c15ull;
}

PrefixHash hash_of(std::uint64_t page, std::uint64_t round) {
  const std::uint32_t tokens[] = {static_cast<std::uint32_t>(page), static_cast<std::uint32_t>(round)};
  return hash_page(tokens, std::nullopt);
}

}  // namespace

NamespaceSpec storage_spec(std::uint64_t page_bytes) {
  NamespaceSpec spec;
  spec.model = "bench";
  spec.dtype = "bytes";
  spec.attention = Attention::mla;
  spec.page_tokens = 64;
  spec.layers = 4;
  spec.heads_per_shard = 1;
  spec.element_bytes = 1;
  spec.head_dim = static_cast<std::uint32_t>(page_bytes / (spec.page_tokens * spec.layers));
  return spec;
}

Result<std::unique_ptr<StorageLoad>> StorageLoad::create(std::uint64_t bytes) {
  auto fd = create_sealed("hicache-bench", bytes);
  if (!fd) return fd.error();
  auto mapping = Mapping::map(fd->get(), bytes, Mapping::Access::read_write);
  if (!mapping) return mapping.error();
  std::unique_ptr<StorageLoad> load(new StorageLoad(std::move(*mapping)));
  load->wipe();
  return load;
}

std::span<std::byte> StorageLoad::memory() const {
  return {static_cast<std::byte*>(mapping_.data()), mapping_.size()};
}

void StorageLoad::wipe() {
  std::memset(mapping_.data(), 0, mapping_.size());
}

void StorageLoad::fill(std::uint64_t page_bytes, std::uint64_t round) {
  for (std::uint64_t at = 0; at < memory().size(); at += kPoolAlignment) {
    const std::uint64_t word = word_of(at / page_bytes, at % page_bytes, round);
    std::memcpy(memory().data() + at, &word, sizeof word);
  }
}

std::uint64_t StorageLoad::wrong(std::uint64_t page_bytes, std::uint64_t round) const {
  std::uint64_t blocks = 0;
  for (std::uint64_t at = 0; at < memory().size(); at += kPoolAlignment) {
    const std::uint64_t word = word_of(at / page_bytes, at % page_bytes, round);
    blocks += std::memcmp(memory().data() + at, &word, sizeof word) != 0;
  }
  return blocks;
}

Outcome StorageLoad::use(const std::string& name, const nlohmann::ordered_json& settings) {
  backend_.reset();
  auto made = daemon::make_storage_backend(name, settings,
                                           {memory().data(), memory().size(), memory().size()}, *this);
  if (!made) return made.error();
  backend_ = std::move(*made);
  return success();
}

std::uint64_t StorageLoad::run(StorageOperation operation, std::uint64_t page_bytes, std::uint64_t round,
                               const std::vector<std::uint32_t>& order) {
  const NamespaceSpec spec = storage_spec(page_bytes);
  const auto ns = std::make_shared<StorageNamespace>(StorageNamespace{spec.digest(), spec});
  // Enough batches to keep several in flight, also of few large pages.
  const std::size_t batch_pages =
      std::clamp<std::size_t>(order.size() / (2 * kBatchesInFlight), 1, kStorageBatchPages);
  failed_ = 0;
  for (std::size_t first = 0; first < order.size(); first += batch_pages) {
    StorageBatch batch;
    batch.id = StorageBatchId{next_batch_++};
    batch.operation = operation;
    batch.ns = ns;
    for (std::size_t i = first; i < std::min(first + batch_pages, order.size()); ++i) {
      batch.hashes.push_back(hash_of(order[i], round));
      batch.buffers.push_back({PoolOffset{order[i] * page_bytes}, page_bytes});
    }
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return in_flight_ < kBatchesInFlight; });
      ++in_flight_;
    }
    backend_->submit(std::move(batch));
  }
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return in_flight_ == 0; });
  return failed_;
}

void StorageLoad::page(StorageBatchId, std::uint32_t, Status outcome) {
  if (outcome == Status::ok) return;
  const std::lock_guard lock(mutex_);
  ++failed_;
}

void StorageLoad::ended(StorageBatchId) {
  const std::lock_guard lock(mutex_);
  --in_flight_;
  changed_.notify_one();
}

}  // namespace hicache::bench
