// Looks at this machine. What can't be read keeps the value that raises no alarm.
#include <linux/io_uring.h>
#include <pwd.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

#include "shm/cgroup_limit.hpp"
#include "shm/fd.hpp"
#include "shm/region.hpp"
#include "shm/socket_path.hpp"
#include "tools/ctl/doctor.hpp"

namespace hicache::ctl {
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

void measure_shm(const daemon::Config& config, const std::string& root, Machine& m) {
  const std::string directory = root + "/dev/shm";
  struct statvfs space {};
  m.shm_mounted = ::statvfs(directory.c_str(), &space) == 0;
  if (m.shm_mounted) {
    m.shm_bytes = std::uint64_t{space.f_blocks} * space.f_frsize;
    m.shm_free = std::uint64_t{space.f_bavail} * space.f_frsize;
    for (const std::string& object : {control_object_name(config.name), pool_object_name(config.name, 0)}) {
      struct stat st {};
      if (::stat((directory + "/" + object).c_str(), &st) == 0)
        m.shm_free += std::uint64_t(st.st_blocks) * 512;
    }
  }
  for (const std::string& line : lines_of(read_text(root + "/proc/mounts"))) {
    std::istringstream in(line);
    std::string device, at, type, options;
    in >> device >> at >> type >> options;
    if (at != "/dev/shm") continue;
    m.shm_huge.clear();
    std::istringstream list(options);
    for (std::string option; std::getline(list, option, ',');) {
      if (option.starts_with("huge=")) m.shm_huge = option.substr(5);
    }
  }
  const std::string choices = read_text(root + "/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  const auto open = choices.find('[');
  const auto close = choices.find(']');
  if (open < close && close != std::string::npos)
    m.shmem_enabled = choices.substr(open + 1, close - open - 1);
}

void measure_memory(const std::string& root, Machine& m) {
  for (const std::string& line : lines_of(read_text(root + "/proc/meminfo"))) {
    std::istringstream in(line);
    std::string key;
    std::uint64_t kib = 0;
    in >> key >> kib;
    if (key == "MemTotal:") m.memory_bytes = kib * 1024;
    if (key == "MemAvailable:") m.memory_available = kib * 1024;
  }
}

void measure_cgroup(const std::string& root, Machine& m) {
  const CgroupMemoryLimit limit = cgroup_memory_limit(root);
  m.cgroup_limit = limit.bytes;
  m.cgroup_path = limit.path;
}

void measure_limits(const std::string& root, Machine& m) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_max != RLIM_INFINITY) m.memlock = limit.rlim_max;
  m.descriptors = kUnlimited;
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_max != RLIM_INFINITY)
    m.descriptors = limit.rlim_max;
  for (const std::string& line : lines_of(read_text(root + "/proc/self/status"))) {
    if (!line.starts_with("CapEff:")) continue;
    constexpr unsigned kIpcLock = 14;
    m.may_lock_any = (std::strtoull(line.c_str() + 7, nullptr, 16) >> kIpcLock & 1) != 0;
  }
}

void measure_socket(const daemon::Config& config, const std::string& root, Machine& m) {
  m.socket_path = config.socket.path.empty() ? default_socket_path(config.name) : config.socket.path;
  SocketDirectory& d = m.socket_directory;
  const auto slash = m.socket_path.rfind('/');
  d.path = slash == std::string::npos ? "." : slash == 0 ? "/" : m.socket_path.substr(0, slash);
  const std::string here = d.path.front() == '/' ? root + d.path : d.path;
  struct stat st {};
  d.exists = ::lstat(here.c_str(), &st) == 0;
  if (d.exists) {
    d.is_directory = S_ISDIR(st.st_mode);
    d.others_write = (st.st_mode & (S_IWGRP | S_IWOTH)) != 0 && (st.st_mode & S_ISVTX) == 0;
    d.owner = st.st_uid;
    d.usable = d.is_directory && ::access(here.c_str(), W_OK | X_OK) == 0;
  } else if (config.socket.path.empty()) {
    // The daemon makes the default directory itself.
    const std::string parent = here.substr(0, here.rfind('/'));
    d.usable = ::access(parent.empty() ? "/" : parent.c_str(), W_OK | X_OK) == 0;
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

void measure_gpus(const Probes& probes, Machine& m) {
  std::error_code error;
  m.nvidia_driver = fs::exists(probes.root + "/proc/driver/nvidia/version", error);
  if (!m.nvidia_driver) {
    m.gpus.emplace();
    return;
  }
  const auto answer = probes.run(
      "nvidia-smi --query-gpu=name,compute_mode,mig.mode.current --format=csv,noheader 2>/dev/null");
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

Machine measure(const daemon::Config& config, const Probes& probes) {
  Machine m;
  m.uid = ::geteuid();
  measure_shm(config, probes.root, m);
  measure_memory(probes.root, m);
  measure_cgroup(probes.root, m);
  measure_limits(probes.root, m);
  measure_socket(config, probes.root, m);
  measure_logind(probes.root, m);
  measure_gpus(probes, m);
  m.io_uring_errno = probes.io_uring();
  return m;
}

}  // namespace hicache::ctl
