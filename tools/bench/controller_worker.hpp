// One rank process of a replay through the controller: a scheduler's loop over PrefixTree and
// HiCacheController. The device keeps nothing from request to request, so every hit is a load from the pool,
// as in a plain replay.
#pragma once

#include "tools/bench/rank_worker.hpp"

namespace hicache::bench {

// Body of the process. Returns its exit status; what went wrong is on its board.
int run_controller_rank(const ReplayPlan& plan, const GroupPlan& group, std::uint32_t tp_rank,
                        const Workload& workload, Board& board);

}  // namespace hicache::bench
