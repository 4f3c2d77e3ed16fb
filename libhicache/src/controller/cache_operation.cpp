#include "hicache/controller/cache_operation.hpp"

#include <algorithm>
#include <atomic>
#include <utility>

namespace hicache {

std::uint64_t CacheOperation::new_id() {
  static std::atomic<std::uint64_t> next{0};  // alone: orders nothing else
  return next.fetch_add(1, std::memory_order_relaxed);
}

CacheOperation::CacheOperation(OperationKind operation_kind, std::vector<std::uint64_t> host,
                               std::vector<std::uint64_t> device, std::int64_t node_id,
                               std::optional<std::int64_t> wanted_priority)
    : kind(operation_kind),
      id(new_id()),
      priority(wanted_priority.value_or(static_cast<std::int64_t>(id))),
      host_slots(std::move(host)),
      device_slots(std::move(device)),
      node_ids{node_id} {}

bool CacheOperation::before(const CacheOperation& other) const {
  if (kind != other.kind) return kind < other.kind;
  if (priority != other.priority) return priority < other.priority;
  return id < other.id;
}

Result<CacheOperationPtr> merge_operations(std::vector<CacheOperationPtr> operations) {
  if (operations.empty()) {
    return Error{Status::invalid_argument, "nothing to merge: expected at least one operation", 0};
  }
  if (operations.size() == 1) return std::move(operations.front());
  auto merged = std::make_unique<CacheOperation>(operations.front()->kind, std::vector<std::uint64_t>{},
                                                 std::vector<std::uint64_t>{});
  merged->priority = operations.front()->priority;
  merged->node_ids.clear();
  for (const CacheOperationPtr& one : operations) {
    if (one->kind != merged->kind) {
      return Error{Status::invalid_argument,
                   "operations of kind " + std::to_string(static_cast<int>(merged->kind)) + " and " +
                       std::to_string(static_cast<int>(one->kind)) + " in one merge; expected one kind",
                   0};
    }
    merged->host_slots.insert(merged->host_slots.end(), one->host_slots.begin(), one->host_slots.end());
    merged->device_slots.insert(merged->device_slots.end(), one->device_slots.begin(),
                                one->device_slots.end());
    merged->node_ids.insert(merged->node_ids.end(), one->node_ids.begin(), one->node_ids.end());
    merged->priority = std::min(merged->priority, one->priority);
  }
  return merged;
}

void order_operations(std::vector<CacheOperationPtr>& operations) {
  std::sort(operations.begin(), operations.end(),
            [](const CacheOperationPtr& a, const CacheOperationPtr& b) { return a->before(*b); });
}

}  // namespace hicache
