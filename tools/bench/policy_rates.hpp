// What each eviction policy of the prefix tree would find of a workload, side by side.
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "hicache/controller/eviction_order.hpp"
#include "shm/status.hpp"
#include "tools/bench/workload.hpp"

namespace hicache::bench {

struct NamedPolicy {
  TreePolicy policy;
  const char* name;
};
inline constexpr std::array<NamedPolicy, 3> kTreePolicies{
    {{TreePolicy::lru, "lru"}, {TreePolicy::lfu, "lfu"}, {TreePolicy::scan_resistant, "scan_resistant"}}};
inline constexpr std::array<std::uint64_t, 3> kComparedPages{1'000, 10'000, 50'000};

struct PolicyRow {
  std::uint64_t pages = 0;                                 // of the host tier
  std::array<std::uint64_t, kTreePolicies.size()> hits{};  // by policy
};

// Replays the workload once for each policy and size, on the tree alone.
Result<std::vector<PolicyRow>> compare_policies(const Workload& workload);

// A line for each size.
std::string policy_text(const std::vector<PolicyRow>& rows, std::uint64_t requested_pages);
nlohmann::json policy_json(const std::vector<PolicyRow>& rows, std::uint64_t requested_pages);

}  // namespace hicache::bench
