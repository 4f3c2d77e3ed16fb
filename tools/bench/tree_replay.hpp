// The prefix tree without a daemon: tiers that only count slots, and a replay of a workload on them.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "hicache/controller/prefix_tree.hpp"
#include "tools/bench/workload.hpp"

namespace hicache::bench {

// Slots are numbers, copies take no time: what is left is the cost of the tree's own decisions.
class SlotTier : public TreeTier {
 public:
  SlotTier(std::uint64_t device_slots, std::uint64_t host_slots);

  Result<std::vector<std::uint64_t>> take_device(std::uint64_t count);
  // Acks of everything started since the last call.
  std::vector<HiCacheAck> acks();

  Result<std::vector<std::uint64_t>> write(std::span<const std::uint64_t> device_slots,
                                           std::span<const PrefixHash> chain, std::int64_t node_id) override;
  Result<std::vector<HiCacheAck>> finish_writes() override { return acks(); }
  Result<HostHold> hold(std::span<const std::uint64_t> host_slots) override;
  void let_go(const HostHold&) override {}
  Result<std::vector<std::uint64_t>> load(const HostHold& hold, std::span<const std::uint64_t> host_slots,
                                          std::int64_t node_id) override;
  Result<std::vector<std::uint64_t>> adopt(std::span<const PrefixHash>) override {
    return std::vector<std::uint64_t>{};  // nobody else writes here
  }
  Outcome evict_device(std::span<const std::uint64_t> device_slots,
                       std::span<const std::uint64_t> host_slots) override;
  [[nodiscard]] std::uint64_t host_available() const override { return host_.size(); }
  Outcome evict_host(std::span<const std::uint64_t> host_slots) override;
  Outcome revive(std::span<const std::uint64_t>) override { return success(); }

 private:
  void ack(OperationKind kind, std::int64_t node, std::uint64_t tokens);
  std::vector<std::uint64_t> device_;  // free ones
  std::vector<std::uint64_t> host_;
  std::vector<HiCacheAck> acks_;
};

// Pages of the workload that a host tier of `pages` pages had when they were asked for, with nothing kept on
// the device between requests.
Result<std::uint64_t> replay_on_tree(const Workload& workload, std::uint64_t pages, TreePolicy policy);

}  // namespace hicache::bench
