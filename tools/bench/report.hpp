// Results as a summary for people and as JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "shm/status.hpp"
#include "tools/bench/replay.hpp"

namespace hicache::bench {

std::string replay_summary(const ReplayOptions& options, const ReplayResult& result);
nlohmann::json replay_json(const ReplayOptions& options, const ReplayResult& result);
nlohmann::json latency_json(const LatencyHistogram& latency);  // microseconds

// Writes to a file; "" = nothing, "-" = standard output.
Outcome write_json(const std::string& path, const nlohmann::json& json);

}  // namespace hicache::bench
