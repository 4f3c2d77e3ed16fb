#include "tools/bench/machine.hpp"

#include <fmt/format.h>
#include <sys/utsname.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tools/bench/child_process.hpp"

namespace hicache::bench {

Machine Machine::here() {
  Machine machine;
  machine.cores = static_cast<std::uint32_t>(usable_cpus().size());
  utsname names{};
  if (::uname(&names) == 0) machine.kernel = fmt::format("{} {}", names.sysname, names.release);
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with("model name")) continue;
    const auto colon = line.find(": ");
    if (colon != std::string::npos) machine.cpu = line.substr(colon + 2);
    break;
  }
  return machine;
}

std::string Machine::text() const {
  return fmt::format("{}, {} cores, {}", cpu, cores, kernel);
}

nlohmann::json Machine::json() const {
  return {{"cpu", cpu}, {"cores", cores}, {"kernel", kernel}};
}

}  // namespace hicache::bench
