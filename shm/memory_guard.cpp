#include "shm/memory_guard.hpp"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string_view>

namespace hicache {
namespace {

std::optional<std::uint64_t> read_number(const std::string& path) {
  std::ifstream in(path);
  std::string word;
  if (!(in >> word)) return std::nullopt;
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  // "max" of version 2: no limit.
  if (error != std::errc{} || end != word.data() + word.size()) return std::nullopt;
  return value;
}

// Value behind a name in a file of "name value" lines.
std::optional<std::uint64_t> read_field(const std::string& path, std::string_view name) {
  std::ifstream in(path);
  std::string line;
  while (std::getline(in, line)) {
    std::istringstream words(line);
    std::string key;
    std::uint64_t value = 0;
    if (words >> key >> value && key == name) return value;
  }
  return std::nullopt;
}

struct GroupFiles {
  std::string limit;
  std::string usage;
  std::string cache;  // name in memory.stat of file pages that go when memory gets short
};

// What this group and those above it leave. Without a limit: everything.
std::uint64_t room_in_groups(const std::string& mount, std::string path, const GroupFiles& files) {
  std::uint64_t room = std::numeric_limits<std::uint64_t>::max();
  for (;;) {
    const std::string directory = mount + path + "/";
    const auto limit = read_number(directory + files.limit);
    const auto usage = read_number(directory + files.usage);
    if (limit && usage) {
      const std::uint64_t cache = read_field(directory + "memory.stat", files.cache).value_or(0);
      const std::uint64_t held = *usage - std::min(*usage, cache);
      room = std::min(room, *limit - std::min(*limit, held));
    }
    if (path.empty()) return room;
    path.erase(path.rfind('/'));
  }
}

std::string clean(std::string path) {
  while (!path.empty() && path.back() == '/') path.pop_back();
  return path;
}

}  // namespace

std::uint64_t host_memory_budget(std::uint64_t available, std::uint32_t ranks, std::uint64_t reserve) {
  if (available <= reserve || ranks == 0) return 0;
  return (available - reserve) / ranks;
}

Outcome check_host_memory(std::uint64_t requested, std::uint64_t available, std::uint32_t ranks,
                          std::uint64_t reserve) {
  const std::uint64_t budget = host_memory_budget(available, ranks, reserve);
  if (requested <= budget) return success();
  return Error{Status::no_space,
               "Not enough host memory available. Requesting " + std::to_string(requested) +
                   " bytes but only " + std::to_string(budget) + " are free for one of " +
                   std::to_string(ranks) + " (of " + std::to_string(available) + " available, " +
                   std::to_string(reserve) + " stay with the system)",
               0};
}

Result<std::uint64_t> available_memory(const std::string& root) {
  const auto kib = read_field(root + "/proc/meminfo", "MemAvailable:");
  if (!kib) {
    return Error{Status::system_error, root + "/proc/meminfo has no MemAvailable; expected one in KiB", 0};
  }
  std::uint64_t available = *kib * 1024;
  std::ifstream groups(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(groups, line)) {
    // number:controllers:path; the controllers are empty for version 2.
    const auto first = line.find(':');
    const auto second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = clean(line.substr(second + 1));
    if (!path.empty() && path.front() != '/') continue;
    if (controllers.empty()) {
      available = std::min(available, room_in_groups(root + "/sys/fs/cgroup", path,
                                                     {"memory.max", "memory.current", "inactive_file"}));
    } else if (controllers == "memory") {
      available =
          std::min(available,
                   room_in_groups(root + "/sys/fs/cgroup/memory", path,
                                  {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"}));
    }
  }
  return available;
}

}  // namespace hicache
