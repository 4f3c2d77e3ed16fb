#include "shm/process.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

namespace hicache {

std::optional<std::uint64_t> process_start_ticks(std::uint32_t pid) {
  std::ifstream in("/proc/" + std::to_string(pid) + "/stat");
  std::string text((std::istreambuf_iterator<char>(in)), {});
  // The command name is in parentheses and may hold anything: fields count from the last one.
  const auto close = text.rfind(')');
  if (close == std::string::npos) return std::nullopt;
  std::istringstream fields(text.substr(close + 1));
  std::string field;
  std::uint64_t start = 0;
  for (int n = 3; n <= 22 && fields >> field; ++n) {
    if (n == 3 && (field == "Z" || field == "X")) return std::nullopt;
    if (n == 22) start = std::stoull(field);
  }
  if (start == 0) return std::nullopt;
  return start;
}

ProcessIdentity ProcessIdentity::self() {
  const auto pid = static_cast<std::uint32_t>(::getpid());
  return {pid, process_start_ticks(pid).value_or(0)};
}

bool ProcessIdentity::alive() const {
  const auto ticks = process_start_ticks(pid);
  return ticks.has_value() && *ticks == start_ticks;
}

std::string boot_id() {
  std::ifstream in("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(in, id);
  return id;
}

UniqueFd open_pidfd(std::uint32_t pid) {
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0)));
}

}  // namespace hicache
