// Pages between GPU memory and the pool, beside a single large copy of the same run.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "shm/status.hpp"
#include "shm/types.hpp"
#include "tools/bench/gpu/gpu_load.hpp"
#include "tools/bench/gpu/gpu_pages.hpp"

namespace hicache::bench {

struct TransferOptions {
  std::vector<std::string> shapes{"8B-tp1", "70B-tp8", "MLA"};
  std::vector<std::string> methods{"auto"};
  std::vector<std::uint32_t> page_tokens{1, 16, 64};
  std::vector<std::uint32_t> runs{1, 4, 16};  // consecutive device pages
  std::vector<BufferLayout> layouts{BufferLayout::together, BufferLayout::separate};
  std::vector<LoadKind> loads{LoadKind::none, LoadKind::gemm, LoadKind::stream};
  std::uint64_t bytes = kGiB;    // in flight
  std::uint32_t operations = 4;  // that share them
  std::uint32_t repeats = 5;     // of which the median counts
  std::uint32_t gpus = 1;        // more: a TP group with a rank on each
  std::string daemon = "{}";     // JSON merged into the daemon's configuration
};

// Prints the table as it grows, and returns it.
Result<nlohmann::json> run_transfer(const TransferOptions& options);
// The same with a rank on each of several GPUs, beside single large copies on all of them at once.
Result<nlohmann::json> run_group_transfer(const TransferOptions& options);

struct LayerwiseOptions {
  std::string shape = "8B-tp1";
  std::string method = "auto";
  std::uint32_t page_tokens = 16;
  std::vector<std::uint32_t> pages{1, 2, 4, 8, 16, 32, 64, 128, 256, 512};
  std::vector<BufferLayout> layouts{BufferLayout::together, BufferLayout::separate};
  std::uint32_t repeats = 9;
  std::uint32_t gpus = 1;
  std::string daemon = "{}";
};

// Time to the first and the last layer of loads, and what a fence costs there and back.
Result<nlohmann::json> run_layerwise(const LayerwiseOptions& options);
// The same with a rank on each of several GPUs: times of the slowest rank.
Result<nlohmann::json> run_group_layerwise(const LayerwiseOptions& options);

// Device pages in blocks of `run` consecutive ones; the blocks are shuffled, always in the same way.
std::vector<DevicePage> shuffled_pages(std::uint32_t count, std::uint32_t run);

}  // namespace hicache::bench
