// What every storage backend does: keep pages outside host memory, in batches, without copies of its own.
//
// A backend knows keys, bytes and time. It does not know leases, groups, priorities or policies: those are
// decided before it (storage_tier.hpp). So a backend may be a local disk, a server across the network or, one
// day, an agent process that speaks this interface over a channel; nothing here is particular to a disk.
//
// Contract
//   1. Asynchronous: submit() never blocks on I/O. Results come through the sink, on a thread of the backend.
//   2. Every accepted batch gets exactly one `ended`, after which the backend never touches the batch's
//      buffers again. Until then they belong to it, also after a cancel and past the deadline.
//   3. Every page of a batch gets exactly one outcome, before `ended`. Outcomes may come in any order and
//      one by one: a page may be used as soon as its outcome is known.
//   4. What was put is visible to exists and get once its outcome was ok, whole or not at all. What get
//      reports as ok is what was put under that key: verified by checksum where the format has one.
//   5. exists is a hint. A get of a page that is gone is not_found, an outcome like any other.
//   6. A deadline that passes ends what has not begun with timed_out; what has begun ends when it ends. The
//      caller has its own clock and does not wait for it.
//   7. No exception leaves a backend and none of its threads ends because of one.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "shm/namespace_spec.hpp"
#include "shm/status.hpp"
#include "shm/types.hpp"

namespace hicache::daemon {

// Pages of one batch at most; larger requests are split by the caller.
constexpr std::uint32_t kStorageBatchPages = 128;

// The namespace a batch's pages belong to. Immutable; batches share it.
struct StorageNamespace {
  PrefixHash digest;  // of `spec`, weights epoch included: part of every key
  NamespaceSpec spec;
};

// A piece of the pool, in whole kPoolAlignment units from an aligned offset. It lies in one pool segment, or
// in consecutive ones when a page's slot is larger than a segment.
struct PoolExtent {
  PoolOffset offset;
  std::uint64_t bytes = 0;
  friend bool operator==(const PoolExtent&, const PoolExtent&) = default;
};

enum class StorageOperation : std::uint8_t {
  exists,  // is it there? no buffers
  get,     // fill the buffers
  put,     // keep the buffers' bytes; a page that is there already is ok without being written again
};

constexpr std::string_view to_string(StorageOperation operation) {
  switch (operation) {
    case StorageOperation::exists:
      return "exists";
    case StorageOperation::get:
      return "get";
    case StorageOperation::put:
      return "put";
  }
  return "unknown_operation";
}

struct StorageBatchId {
  std::uint64_t value = 0;
  friend bool operator==(StorageBatchId, StorageBatchId) = default;
};

// Some pages of one namespace. Page i has the hash hashes[i] and, for get and put, the buffers
// [i * shards, (i + 1) * shards): the whole logical page, one buffer a shard in shard order, each
// spec.shard_bytes() of payload at the start of its extent (the rest is padding and carries no meaning).
struct StorageBatch {
  StorageBatchId id;
  StorageOperation operation = StorageOperation::exists;
  std::shared_ptr<const StorageNamespace> ns;
  std::vector<PrefixHash> hashes;
  std::vector<PoolExtent> buffers;
  std::uint64_t deadline_ns = 0;  // CLOCK_MONOTONIC; 0 = none

  [[nodiscard]] std::size_t pages() const { return hashes.size(); }
  [[nodiscard]] std::span<const PoolExtent> buffers_of(std::size_t page) const {
    const std::size_t shards = buffers.size() / hashes.size();
    return std::span(buffers).subspan(page * shards, shards);
  }
};

// Outcomes of a page:
//   ok            exists: it is there; get: the buffers hold it; put: it is kept
//   not_found     exists, get: it is not there
//   corrupt       get: what is there is damaged, short or somebody else's; the backend has dropped it
//   no_space      put: capacity, a full disk or a full server
//   timed_out     the deadline passed before it began, or the medium did not answer in time
//   closed        cancelled before it began, or the backend is being detached
//   dropped       put: not kept, for example because too much is queued
//   system_error  the medium failed; errno or the server's word is in the health text
class StorageSink {
 public:
  virtual ~StorageSink() = default;
  // Buffers of a get or put that are reported here are not touched again.
  virtual void page(StorageBatchId batch, std::uint32_t page, Status outcome) = 0;
  virtual void ended(StorageBatchId batch) = 0;
};

// The pool, mapped for the backend's whole life. Backends may register it with their medium.
struct StoragePool {
  std::byte* base = nullptr;
  std::uint64_t bytes = 0;
  std::uint64_t segment_bytes = 0;

  // Precondition: the extent lies inside the pool.
  [[nodiscard]] std::span<std::byte> at(const PoolExtent& extent) const {
    return {base + extent.offset.value, extent.bytes};
  }
};

struct StorageHealth {
  bool usable = true;
  std::string text;  // one line for a person: what is wrong, or what it is ("segment files in /data, 12 GiB")
};

// Gauges and counters of the backend's own; those of batches and latency are kept by the caller.
struct StorageStats {
  std::uint64_t pages = 0;           // kept now, 0 where the backend can't know
  std::uint64_t bytes = 0;           // occupied now, likewise
  std::uint64_t capacity_bytes = 0;  // 0 = unlimited or unknown
  std::uint64_t evicted_pages = 0;
  std::uint64_t corrupt_pages = 0;
  std::uint64_t failed_operations = 0;  // of the medium
};

// Thread safety: every method may be called from any thread. The destructor ends what has not begun with
// closed, waits for what has, and tells the sink; it is the only method that may wait.
class StorageBackend {
 public:
  virtual ~StorageBackend() = default;
  [[nodiscard]] virtual std::string_view name() const = 0;
  // Precondition: 1 to kStorageBatchPages pages.
  virtual void submit(StorageBatch batch) = 0;
  // Pages that have not begun end with closed. An unknown batch is ignored.
  virtual void cancel(StorageBatchId batch) = 0;
  // Forgets every page, also those of earlier runs. Batches in flight end as they can.
  virtual Outcome clear() = 0;
  [[nodiscard]] virtual StorageHealth health() const = 0;
  [[nodiscard]] virtual StorageStats stats() const = 0;
};

}  // namespace hicache::daemon
