// The control-path benchmarks: what a round trip, a lookup and a page operation cost, each beside what bare
// hardware and kernel need for the same kind of work in the same run.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "shm/status.hpp"

namespace hicache::bench {

struct MicroOptions {
  double seconds = 5;  // of each measurement, roughly
};

// No-op round trips when spinning and when parked, fairness of eight closed-loop ranks, and the idle daemon.
Result<nlohmann::json> run_rtt(const MicroOptions& options);
// Lookups of random 128-page prefixes in an index of a million pages.
Result<nlohmann::json> run_probe(const MicroOptions& options);
// Page operations a second through the coordinator, from four ranks.
Result<nlohmann::json> run_ops(const MicroOptions& options);

}  // namespace hicache::bench
