#include "tools/bench/tree_replay.hpp"

#include <numeric>

namespace hicache::bench {
namespace {

std::vector<std::uint64_t> numbers(std::uint64_t count) {
  std::vector<std::uint64_t> all(count);
  std::iota(all.begin(), all.end(), std::uint64_t{0});
  return all;
}

Result<std::vector<std::uint64_t>> take(std::vector<std::uint64_t>& from, std::uint64_t count) {
  if (from.size() < count) return Error{Status::no_space, "too few slots are free", 0};
  const auto first = from.end() - static_cast<std::ptrdiff_t>(count);
  std::vector<std::uint64_t> taken(first, from.end());
  from.erase(first, from.end());
  return taken;
}

}  // namespace

SlotTier::SlotTier(std::uint64_t device_slots, std::uint64_t host_slots)
    : device_(numbers(device_slots)), host_(numbers(host_slots)) {}

void SlotTier::ack(OperationKind kind, std::int64_t node, std::uint64_t tokens) {
  HiCacheAck ack;
  ack.kind = kind;
  ack.node_ids = {node};
  ack.tokens = ack.host_tokens = tokens;
  acks_.push_back(std::move(ack));
}

std::vector<HiCacheAck> SlotTier::acks() {
  return std::exchange(acks_, {});
}

Result<std::vector<std::uint64_t>> SlotTier::take_device(std::uint64_t count) {
  return take(device_, count);
}

Result<std::vector<std::uint64_t>> SlotTier::write(std::span<const std::uint64_t> device_slots,
                                                   std::span<const PrefixHash>, std::int64_t node_id) {
  auto slots = take(host_, device_slots.size());
  if (slots) ack(OperationKind::write, node_id, device_slots.size());
  return slots;
}

Result<HostHold> SlotTier::hold(std::span<const std::uint64_t> host_slots) {
  HostHold held;
  held.tokens = held.present_tokens = host_slots.size();
  return held;
}

Result<std::vector<std::uint64_t>> SlotTier::load(const HostHold&, std::span<const std::uint64_t> host_slots,
                                                  std::int64_t node_id) {
  auto slots = take(device_, host_slots.size());
  if (slots) ack(OperationKind::load, node_id, host_slots.size());
  return slots;
}

Outcome SlotTier::evict_device(std::span<const std::uint64_t> device_slots, std::span<const std::uint64_t>) {
  device_.insert(device_.end(), device_slots.begin(), device_slots.end());
  return success();
}

Outcome SlotTier::evict_host(std::span<const std::uint64_t> host_slots) {
  host_.insert(host_.end(), host_slots.begin(), host_slots.end());
  return success();
}

Result<std::uint64_t> replay_on_tree(const Workload& workload, std::uint64_t pages, TreePolicy policy) {
  SlotTier tier(workload.longest(), pages);
  PrefixTreeOptions options;
  options.page_tokens = 1;
  options.load_back_threshold = 1;
  options.eviction = policy;
  options.ghosts = pages;
  PrefixTree tree(options, tier);
  std::uint64_t hits = 0;
  for (std::size_t request = 0; request < workload.size(); ++request) {
    const auto keys = workload.keys(request);
    const PrefixMatch found = tree.match(keys);
    std::vector<std::uint64_t> slots;
    if (found.host_tokens > 0) {
      auto back = tree.load_back(found.host_node, keys.size());
      if (!back) return back.error();
      slots = std::move(back->device_slots);
      hits += slots.size();
    }
    const auto fresh = tier.take_device(keys.size() - slots.size());
    if (!fresh) return fresh.error();
    slots.insert(slots.end(), fresh->begin(), fresh->end());
    if (const auto inserted = tree.insert(keys, slots); !inserted) return inserted.error();
    tree.apply(tier.acks());
    tree.evict(keys.size());
  }
  return hits;
}

}  // namespace hicache::bench
