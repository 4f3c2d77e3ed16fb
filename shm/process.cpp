#include "shm/process.hpp"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <fstream>
#include <sstream>

namespace hicache {

namespace {

enum class Zombies { count, ignore };

std::optional<std::uint64_t> read_start_ticks(std::uint32_t pid, Zombies zombies) {
  std::ifstream in("/proc/" + std::to_string(pid) + "/stat");
  std::string text((std::istreambuf_iterator<char>(in)), {});
  // The command name is in parentheses and may hold anything: fields count from the last one.
  const auto close = text.rfind(')');
  if (close == std::string::npos) return std::nullopt;
  std::istringstream fields(text.substr(close + 1));
  std::string field;
  std::uint64_t start = 0;
  for (int n = 3; n <= 22 && fields >> field; ++n) {
    if (n == 3 && zombies == Zombies::ignore && (field == "Z" || field == "X")) return std::nullopt;
    if (n == 22) start = std::stoull(field);
  }
  if (start == 0) return std::nullopt;
  return start;
}

}  // namespace

std::optional<std::uint64_t> process_start_ticks(std::uint32_t pid) {
  return read_start_ticks(pid, Zombies::ignore);
}

ProcessIdentity ProcessIdentity::self() {
  const auto pid = static_cast<std::uint32_t>(::getpid());
  return {pid, process_start_ticks(pid).value_or(0)};
}

bool ProcessIdentity::alive() const {
  const auto ticks = process_start_ticks(pid);
  return ticks.has_value() && *ticks == start_ticks;
}

bool await_process_end(const ProcessIdentity& process, int timeout_ms) {
  const UniqueFd pidfd = open_pidfd(process.pid);
  if (!pidfd.valid() && errno == ESRCH) return true;
  // Looked at after the pidfd was opened: equal start times prove that the pidfd means this very process.
  if (read_start_ticks(process.pid, Zombies::count) != process.start_ticks) return true;
  if (pidfd.valid()) {
    pollfd look{pidfd.get(), POLLIN, 0};
    return ::poll(&look, 1, timeout_ms) > 0;
  }
  // No pidfd here: gone from /proc is gone.
  for (int waited = 0; waited < timeout_ms; waited += 10) {
    const timespec nap{0, 10'000'000};
    ::nanosleep(&nap, nullptr);
    if (read_start_ticks(process.pid, Zombies::count) != process.start_ticks) return true;
  }
  return false;
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
