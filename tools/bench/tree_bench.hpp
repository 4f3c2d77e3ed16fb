// What the prefix tree costs as it grows, and how well its policies do on a trace.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "shm/status.hpp"

namespace hicache::bench {

struct TreeBenchOptions {
  std::string trace;        // "" = costs only
  std::uint64_t limit = 0;  // requests of the trace at most; 0 = all
};

Result<nlohmann::json> run_tree_bench(const TreeBenchOptions& options);

}  // namespace hicache::bench
