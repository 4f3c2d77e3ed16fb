// Requests under fire: ranks and the daemon are killed and stopped while everything that is loaded is
// compared.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "shm/status.hpp"

namespace hicache::bench {

struct ChaosOptions {
  double minutes = 1;
  std::uint32_t seed = 1;
};

// "success" in the answer: no wrong byte, operations in every interval, at least 20 kills a minute, and a
// clean hicache-dump --check at the end.
Result<nlohmann::json> run_chaos(const ChaosOptions& options);

}  // namespace hicache::bench
