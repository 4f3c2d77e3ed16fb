// Looks at this machine.
#include <linux/io_uring.h>
#include <pwd.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

#include "shm/cgroup_limit.hpp"
#include "shm/fd.hpp"
#include "shm/machine/machine.hpp"
#include "shm/memory_guard.hpp"
#include "shm/region.hpp"
#include "shm/types.hpp"

namespace hicache::machine {
namespace {

namespace fs = std::filesystem;

std::string read_text(const std::string& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::string trimmed(const std::string& text) {
  const auto first = text.find_first_not_of(" \t\r\n");
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(" \t\r\n") - first + 1);
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// The `huge` option of the file system that /dev/shm lies on: its own, or that of a tmpfs at /dev.
std::string huge_option(const std::string& mounts) {
  std::string huge;
  std::size_t closest = 0;
  for (const std::string& line : lines_of(mounts)) {
    std::istringstream in(line);
    std::string device, at, type, options;
    in >> device >> at >> type >> options;
    // The last mount at a place is the one that is seen.
    if ((at != "/dev/shm" && at != "/dev" && at != "/") || at.size() < closest) continue;
    closest = at.size();
    huge.clear();
    std::istringstream list(options);
    for (std::string option; std::getline(list, option, ',');) {
      if (type == "tmpfs" && option.starts_with("huge=")) huge = option.substr(5);
    }
  }
  return huge;
}

std::string bracketed(const std::string& choices) {
  const auto open = choices.find('[');
  const auto close = choices.find(']');
  if (open == std::string::npos || close == std::string::npos || close < open) return "";
  return choices.substr(open + 1, close - open - 1);
}

std::uint64_t total_memory(const std::string& root) {
  for (const std::string& line : lines_of(read_text(root + "/proc/meminfo"))) {
    std::istringstream in(line);
    std::string key;
    std::uint64_t kib = 0;
    if (in >> key >> kib && key == "MemTotal:" && kib < kUnlimited / 1024) return kib * 1024;
  }
  return kUnlimited;
}

// The hard limit in a line such as "Max open files  1024  1048576  files".
std::uint64_t hard_limit(const std::string& limits, const std::string& name) {
  for (const std::string& line : lines_of(limits)) {
    if (!line.starts_with(name)) continue;
    std::istringstream in(line.substr(name.size()));
    std::string soft, hard;
    in >> soft >> hard;
    std::uint64_t value = 0;
    const auto [end, error] = std::from_chars(hard.data(), hard.data() + hard.size(), value);
    if (error == std::errc{} && end == hard.data() + hard.size()) return value;
  }
  return kUnlimited;
}

void measure_limits(const std::string& root, Machine& m) {
  const std::string limits = read_text(root + "/proc/self/limits");
  m.memlock = hard_limit(limits, "Max locked memory");
  m.descriptors = hard_limit(limits, "Max open files");
  for (const std::string& line : lines_of(read_text(root + "/proc/self/status"))) {
    if (!line.starts_with("CapEff:")) continue;
    constexpr unsigned kIpcLock = 14;
    const std::string digits = trimmed(line.substr(std::strlen("CapEff:")));
    std::uint64_t capabilities = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), capabilities, 16);
    m.may_lock_any =
        error == std::errc{} && end == digits.data() + digits.size() && (capabilities >> kIpcLock & 1) != 0;
  }
}

// Files that say more are read later: the main file, then the drop-ins in the order of their names.
void measure_logind(const std::string& root, Machine& m) {
  std::error_code error;
  m.logind = fs::exists(root + "/run/systemd/seats", error);
  std::vector<fs::path> drop_ins;
  for (const char* directory : {"/usr/lib/systemd", "/run/systemd", "/etc/systemd"}) {
    const fs::path list = root + directory + "/logind.conf.d";
    for (const auto& entry : fs::directory_iterator(list, error)) {
      if (entry.path().extension() == ".conf") drop_ins.push_back(entry.path());
    }
  }
  std::stable_sort(drop_ins.begin(), drop_ins.end(),
                   [](const fs::path& a, const fs::path& b) { return a.filename() < b.filename(); });
  drop_ins.insert(drop_ins.begin(), root + "/etc/systemd/logind.conf");
  for (const fs::path& path : drop_ins) {
    for (const std::string& raw : lines_of(read_text(path.string()))) {
      const std::string line = trimmed(raw);
      if (!line.starts_with("RemoveIPC=")) continue;
      const std::string value = line.substr(10);
      m.remove_ipc = !(value == "no" || value == "false" || value == "0" || value == "off");
    }
  }
  if (const passwd* user = ::getpwuid(m.uid)) {
    m.lingers = fs::exists(root + "/var/lib/systemd/linger/" + user->pw_name, error);
  }
}

std::optional<std::string> run_program(const std::string& command) {
  FILE* pipe = ::popen(command.c_str(), "re");
  if (pipe == nullptr) return std::nullopt;
  std::string output;
  char part[512];
  for (std::size_t n = 0; (n = std::fread(part, 1, sizeof part, pipe)) > 0;) output.append(part, n);
  return ::pclose(pipe) == 0 ? std::optional(output) : std::nullopt;
}

int try_io_uring() {
  io_uring_params params{};
  const UniqueFd ring(static_cast<int>(::syscall(__NR_io_uring_setup, 1, &params)));
  return ring.valid() ? 0 : errno;
}

}  // namespace

Probes Probes::real() {
  return Probes{"", run_program, try_io_uring};
}

void measure_room(const Needs& needs, const std::string& root, Machine& m) {
  const std::string directory = root + "/dev/shm";
  struct statvfs space {};
  m.shm_mounted = ::statvfs(directory.c_str(), &space) == 0;
  if (m.shm_mounted) {
    m.shm_bytes = std::uint64_t{space.f_blocks} * space.f_frsize;
    m.shm_free = std::uint64_t{space.f_bavail} * space.f_frsize;
    m.shm_held = 0;
    for (const std::string& object : {control_object_name(needs.name), pool_object_name(needs.name, 0)}) {
      struct stat st {};
      if (::lstat((directory + "/" + object).c_str(), &st) == 0 && S_ISREG(st.st_mode))
        m.shm_held += static_cast<std::uint64_t>(st.st_blocks) * 512;
    }
  }
  m.memory_bytes = total_memory(root);
  if (const auto available = available_memory(root)) m.memory_available = *available;
}

SocketDirectory measure_socket_directory(const Needs& needs, const std::string& root) {
  SocketDirectory d;
  const auto slash = needs.socket_path.rfind('/');
  d.path = slash == std::string::npos ? "." : slash == 0 ? "/" : needs.socket_path.substr(0, slash);
  const std::string here = d.path.front() == '/' ? root + d.path : d.path;
  struct stat st {};
  // In a place that everybody can write to, such as /tmp, a link may be somebody else's trap. A configured
  // path is what its author wanted.
  d.exists = (needs.own_directory ? ::lstat(here.c_str(), &st) : ::stat(here.c_str(), &st)) == 0;
  if (d.exists) {
    d.is_directory = S_ISDIR(st.st_mode);
    d.others_write = (st.st_mode & (S_IWGRP | S_IWOTH)) != 0 && (st.st_mode & S_ISVTX) == 0;
    d.owner = st.st_uid;
    d.usable = d.is_directory && ::eaccess(here.c_str(), W_OK | X_OK) == 0;
  } else if (needs.own_directory) {
    const std::string parent = here.substr(0, here.rfind('/'));
    d.usable = ::eaccess(parent.empty() ? "/" : parent.c_str(), W_OK | X_OK) == 0;
  }
  if (!d.usable && (!d.exists || d.is_directory)) d.unusable_cause = std::strerror(errno);
  return d;
}

Machine measure(const Needs& needs, const Probes& probes) {
  Machine m;
  m.uid = ::geteuid();
  measure_room(needs, probes.root, m);
  m.shm_huge = huge_option(read_text(probes.root + "/proc/mounts"));
  m.shmem_enabled = bracketed(read_text(probes.root + "/sys/kernel/mm/transparent_hugepage/shmem_enabled"));
  const CgroupMemoryLimit limit = cgroup_memory_limit(probes.root);
  m.cgroup_limit = limit.bytes;
  m.cgroup_path = limit.path;
  measure_limits(probes.root, m);
  m.socket_directory = measure_socket_directory(needs, probes.root);
  measure_logind(probes.root, m);
  m.nvidia_driver = has_nvidia_driver(probes.root);
  if (needs.io_uring != IoUringNeed::none) m.io_uring_errno = probes.io_uring();
  return m;
}

bool has_nvidia_driver(const std::string& root) {
  std::error_code error;
  return fs::exists(root + "/proc/driver/nvidia/version", error);
}

void measure_gpus(const Probes& probes, Machine& m) {
  if (!m.nvidia_driver) return;
  const auto answer = probes.run(
      "timeout 10 nvidia-smi --query-gpu=name,compute_mode,mig.mode.current --format=csv,noheader "
      "2>/dev/null </dev/null");
  if (!answer) return;
  m.gpus.emplace();
  for (const std::string& line : lines_of(*answer)) {
    std::istringstream in(line);
    std::string name, mode, mig;
    std::getline(in, name, ',');
    std::getline(in, mode, ',');
    std::getline(in, mig, ',');
    if (!trimmed(name).empty()) m.gpus->push_back({trimmed(name), trimmed(mode), trimmed(mig) == "Enabled"});
  }
}

}  // namespace hicache::machine
