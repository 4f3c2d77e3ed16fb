// What storage backends give beside the bare disk.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "shm/status.hpp"
#include "shm/types.hpp"

namespace hicache::bench {

struct StorageBenchOptions {
  std::string directory;             // for the files of all of it, on the disk to be measured
  std::uint64_t bytes = 512 * kMiB;  // moved each way in a measurement: the pool, and the pages
  std::vector<std::uint64_t> page_bytes = {128 * kKiB, kMiB, 4 * kMiB};
  std::uint32_t repeats = 5;
  std::uint32_t depth = 32;     // transfers in flight of the bare copy
  std::string engine = "auto";  // of the backend file, as storage.file.engine
  // More backends than the two formats of `file`: a name and its settings, as storage.NAME in a
  // configuration.
  std::vector<std::pair<std::string, std::string>> also;
};

// Writes and reads pages of each size through each backend, in turn with a bare copy of the same bytes, and
// compares every page that was read. "success" in the answer: every page was kept and came back right.
Result<nlohmann::json> run_storage(const StorageBenchOptions& options);

}  // namespace hicache::bench
