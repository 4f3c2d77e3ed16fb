// One rank process of a replay: works off all requests in step with its group, `concurrency` of them at a
// time, on one asynchronous session.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hicache/controller/eviction_order.hpp"
#include "libhicache/include/hicache/io_backend.hpp"
#include "shm/device_geometry.hpp"
#include "shm/namespace_spec.hpp"
#include "tools/bench/scoreboard.hpp"
#include "tools/bench/workload.hpp"

namespace hicache::bench {

// An engine: one TP group.
struct GroupPlan {
  std::string engine;
  NamespaceSpec spec;
  std::uint32_t first_board = 0;  // of rank 0; the others follow
};

struct ReplayPlan {
  std::string socket_path;
  std::uint32_t concurrency = 1;
  DeviceKind device = DeviceKind::host;  // where the ranks' pages lie
  std::uint32_t gpus = 1;                // rank r sees GPU r % gpus only
  IoBackend io_backend = IoBackend::direct;
  bool controller = false;              // through HiCacheController and PrefixTree
  TreePolicy policy = TreePolicy::lru;  // controller: the tree's
  bool storage = false;                 // what the pool does not have is asked for in storage
  bool storage_sync = false;            // each request's pages are backed up before the next one begins
  std::uint64_t host_tokens = 0;        // controller: handles of each rank
  std::vector<GroupPlan> groups;

  [[nodiscard]] std::uint32_t ranks() const {
    std::uint32_t n = 0;
    for (const GroupPlan& group : groups) n += group.spec.tp_size;
    return n;
  }
};

// Body of the process. Returns its exit status; what went wrong is on its board.
int run_rank(const ReplayPlan& plan, const GroupPlan& group, std::uint32_t tp_rank, const Workload& workload,
             Board& board);

}  // namespace hicache::bench
