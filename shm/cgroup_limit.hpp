// The memory limit that a cgroup sets for this process.
#pragma once

#include <cstdint>
#include <string>

namespace hicache {

constexpr std::uint64_t kNoMemoryLimit = ~0ull;

struct CgroupMemoryLimit {
  std::uint64_t bytes = kNoMemoryLimit;
  std::string path;  // the file that says so
};

// The tightest limit between this process's group and the root, of either cgroup version. `root` stands
// before /proc and /sys; "" = this machine. What can't be read is no limit.
CgroupMemoryLimit cgroup_memory_limit(const std::string& root);

}  // namespace hicache
