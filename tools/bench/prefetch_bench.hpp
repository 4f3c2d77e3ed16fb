// How much of a prefetch overlaps with the use of what it brings.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "shm/status.hpp"
#include "shm/types.hpp"

namespace hicache::bench {

struct PrefetchBenchOptions {
  std::uint32_t pages = 1000;
  std::uint64_t page_bytes = 128 * kKiB;
  std::string storage = "memory";
  std::string storage_dir;              // of a backend that keeps files
  std::uint32_t memory_delay_us = 100;  // of each page of the backend memory
};

// Stores a prefix, empties the pool, prefetches the prefix, and measures when its first page was loaded and
// compared, when half of it was ready, and when the last page was. "success" in the answer: every page came,
// every byte was right, and the first page had been loaded before the last one was read.
Result<nlohmann::json> run_prefetch_bench(const PrefetchBenchOptions& options);

}  // namespace hicache::bench
