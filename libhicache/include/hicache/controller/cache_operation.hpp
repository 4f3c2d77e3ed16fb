// What the controller queues and hands back: operations in the order in which they run, and acks.
//
// Thread safety: values; new_operation_id may be called from any thread.
#pragma once

#include <compare>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "hicache/client.hpp"
#include "hicache/export.h"

namespace hicache {

// Node id of an operation that belongs to no node of a tree.
constexpr std::int64_t kNoNode = -1;

// Loads hold up a request, writes hold device memory, prefetches help later, backups help last: that is also
// their order.
enum class OperationKind : std::uint8_t { load = 0, write = 1, prefetch = 2, backup = 3 };

// A copy between token slots of the host and the device, for one node or, merged, for several.
struct HICACHE_EXPORT CacheOperation {
  // Ids grow within the process, so that operations without a priority run first in, first out.
  static std::uint64_t new_id();

  CacheOperation(OperationKind kind, std::vector<std::uint64_t> host_slots,
                 std::vector<std::uint64_t> device_slots, std::int64_t node_id = kNoNode,
                 std::optional<std::int64_t> priority = std::nullopt);

  OperationKind kind;
  std::uint64_t id;
  std::int64_t priority;  // smaller first; the id unless one was given
  std::vector<std::uint64_t> host_slots;
  std::vector<std::uint64_t> device_slots;
  std::vector<std::int64_t> node_ids;

  // True when this one runs first: by kind, then priority, then age.
  [[nodiscard]] bool before(const CacheOperation& other) const;
};
using CacheOperationPtr = std::unique_ptr<CacheOperation>;

// One operation that does the work of all, in list order, with the smallest priority. A single operation
// comes back as it is. invalid_argument for an empty list or operations of different kinds.
HICACHE_EXPORT Result<CacheOperationPtr> merge_operations(std::vector<CacheOperationPtr> operations);

// Puts operations in the order in which they run.
HICACHE_EXPORT void order_operations(std::vector<CacheOperationPtr>& operations);

// What became of an operation. Acks come in the group's order, the same on every rank, `local` and `bytes`
// excepted.
struct HiCacheAck {
  OperationKind kind = OperationKind::write;
  std::uint64_t epoch = 0;           // of the controller when the operation began: grows with every reset
  std::uint64_t sequence = 0;        // group sequence of the operation
  std::optional<WriteFence> start;   // write: what it waited for before it read device memory
  std::optional<LayerFence> finish;  // load: the fence whose last layer is its end
  std::vector<std::int64_t> node_ids;
  std::uint64_t tokens = 0;
  std::uint64_t host_tokens = 0;  // write: leading tokens that the host holds now
  Status status = Status::ok;     // ok, or dropped: not everything is where it should be
  Status local = Status::ok;      // how it ended for this rank
  std::uint64_t bytes = 0;        // copied for this rank
};

}  // namespace hicache
