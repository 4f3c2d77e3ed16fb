// How soon a restarted daemon serves the pages of a killed one.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>

#include "shm/status.hpp"
#include "shm/types.hpp"

namespace hicache::bench {

struct RestartOptions {
  std::uint32_t pages = 50'000;
  std::uint64_t pool_bytes = 4 * kGiB;
  std::uint64_t page_bytes = 64 * kKiB;
  bool pinned = false;  // the daemon pins the pool for every GPU at its start
};

// Fills a pool, kills the daemon, starts another one, and attaches until the first page has been loaded and
// compared; then loads and compares all of them. "success" in the answer: every page was found, and every
// byte was right.
Result<nlohmann::json> run_restart(const RestartOptions& options);

}  // namespace hicache::bench
