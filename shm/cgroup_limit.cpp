#include "shm/cgroup_limit.hpp"

#include <cstdlib>
#include <fstream>

namespace hicache {
namespace {

// In a container the group's own path may not be visible; then the mounted root stands for it.
void tighten(const std::string& mount, std::string path, const std::string& file,
             CgroupMemoryLimit& tightest) {
  for (;;) {
    const std::string name = mount + (path == "/" ? "" : path) + "/" + file;
    std::ifstream in(name);
    std::uint64_t limit = 0;
    // "max", or nothing at the root: no limit. The old hierarchy says a number near 2^63.
    if (in >> limit && limit < (1ull << 62) && limit < tightest.bytes) tightest = {limit, name};
    if (path.empty() || path == "/") return;
    path.resize(path.rfind('/'));
  }
}

}  // namespace

CgroupMemoryLimit cgroup_memory_limit(const std::string& root) {
  CgroupMemoryLimit tightest;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first == std::string::npos ? first : first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) tighten(root + "/sys/fs/cgroup", path, "memory.max", tightest);
    if (("," + controllers + ",").find(",memory,") != std::string::npos)
      tighten(root + "/sys/fs/cgroup/memory", path, "memory.limit_in_bytes", tightest);
  }
  return tightest;
}

}  // namespace hicache
