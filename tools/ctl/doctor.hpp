// hicache-ctl doctor: what a daemon with a given configuration will meet on this machine. Measuring and
// judging are apart, so that every judgement can be tested with a made-up machine.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "daemon/config.hpp"

namespace hicache::ctl {

constexpr std::uint64_t kUnlimited = ~0ull;

struct Gpu {
  std::string name;
  std::string compute_mode;  // as nvidia-smi says: "Default", "Exclusive_Process", "Prohibited"
  bool mig = false;
};

// The directory of the socket, or what is there instead.
struct SocketDirectory {
  std::string path;
  bool exists = false;
  bool is_directory = false;
  bool others_write = false;  // group or others may replace what lies in it
  std::uint32_t owner = 0;
  bool usable = false;  // this user may make files in it, or make it
};

// Everything that the checks look at. Sizes in bytes.
struct Machine {
  std::uint32_t uid = 0;
  bool shm_mounted = false;
  std::uint64_t shm_bytes = 0;
  std::uint64_t shm_free = 0;  // what objects of this daemon's name hold counts as free: they are replaced
  std::string shm_huge;        // value of the mount's `huge` option, "" = none
  std::string shmem_enabled;   // the kernel's choice for shared memory, such as "never" or "force"
  std::uint64_t memory_bytes = 0;
  std::uint64_t memory_available = 0;
  std::uint64_t cgroup_limit = kUnlimited;  // the tightest on the way to the root
  std::string cgroup_path;                  // where it is set
  std::uint64_t memlock = kUnlimited;       // hard limit
  bool may_lock_any = false;                // CAP_IPC_LOCK: memlock does not apply
  std::uint64_t descriptors = 0;            // hard limit: the daemon raises itself to it
  std::string socket_path;
  SocketDirectory socket_directory;
  bool logind = false;  // systemd-logind manages sessions here
  bool remove_ipc = true;
  bool lingers = false;  // this user's things stay after the last logout
  bool nvidia_driver = false;
  std::optional<std::vector<Gpu>> gpus;  // nothing when nvidia-smi could not be asked
  int io_uring_errno = 0;                // of io_uring_setup, 0 = allowed
};

// Where to look. Tests give a directory of their own as `root` and answers of their own for programs.
struct Probes {
  std::string root;  // before /dev, /proc, /sys, /etc and /run; "" = this machine
  // Standard output of a program, or nothing when it could not run.
  std::function<std::optional<std::string>(const std::string& command)> run;
  std::function<int()> io_uring;  // errno of io_uring_setup, 0 = allowed
  static Probes real();
};

Machine measure(const daemon::Config& config, const Probes& probes);

enum class Level { ok, warn, fail };

struct Check {
  std::string name;
  Level level = Level::ok;
  std::string found;   // what is there, with the value
  std::string remedy;  // what to do; empty when ok
};

// In the order of the report, always every check.
std::vector<Check> examine(const daemon::Config& config, const Machine& machine);

std::string doctor_text(const std::vector<Check>& checks);
std::string doctor_json(const std::vector<Check>& checks);
// 1 when a check failed, else 0.
int doctor_exit_code(const std::vector<Check>& checks);

// hicache-ctl doctor [--config FILE] [--json]; `argv` begins with the word doctor.
int run_doctor(int argc, const char* const* argv);

}  // namespace hicache::ctl
