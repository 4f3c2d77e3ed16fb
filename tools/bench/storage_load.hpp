// Batches of pages through a storage backend, several in flight, timed.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "daemon/storage/backend.hpp"
#include "shm/shared_memory.hpp"
#include "shm/status.hpp"

namespace hicache::bench {

// The namespace of pages of that many bytes, a multiple of 4 KiB.
NamespaceSpec storage_spec(std::uint64_t page_bytes);

// A pool of whole pages whose every block of 4 KiB begins with the number of its page and round.
class StorageLoad final : private daemon::StorageSink {
 public:
  static Result<std::unique_ptr<StorageLoad>> create(std::uint64_t bytes);

  [[nodiscard]] std::span<std::byte> memory() const;
  void fill(std::uint64_t page_bytes, std::uint64_t round);
  // Pages that are not what fill() made of them.
  [[nodiscard]] std::uint64_t wrong(std::uint64_t page_bytes, std::uint64_t round) const;
  void wipe();

  // The backend that put() and get() go to; nothing keeps none.
  Outcome use(const std::string& name, const nlohmann::ordered_json& settings);
  void use_none() { backend_.reset(); }

  // Moves all pages of the pool, in that order; how many had another outcome than ok.
  std::uint64_t run(daemon::StorageOperation operation, std::uint64_t page_bytes, std::uint64_t round,
                    const std::vector<std::uint32_t>& order);

 private:
  explicit StorageLoad(Mapping mapping) : mapping_(std::move(mapping)) {}
  void page(daemon::StorageBatchId batch, std::uint32_t page, Status outcome) override;
  void ended(daemon::StorageBatchId batch) override;

  Mapping mapping_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint32_t in_flight_ = 0;
  std::uint64_t failed_ = 0;
  std::uint64_t next_batch_ = 1;
  std::unique_ptr<daemon::StorageBackend> backend_;  // last: its threads use the above
};

}  // namespace hicache::bench
