// What a daemon meets on a machine, as far as the start checks look at it. Measuring is here and judging in
// checks.hpp, so that every judgement can be tested with a made-up machine.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "shm/machine/needs.hpp"

namespace hicache::machine {

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
  bool others_write = false;   // group or others may replace what lies in it
  std::uint32_t owner = 0;     // uid
  bool usable = false;         // this user may make files in it, or make it
  std::string unusable_cause;  // what the kernel says about that, "" = nothing
};

// Sizes in bytes. What can't be read keeps its default, which raises no alarm.
struct Machine {
  std::uint32_t uid = 0;
  bool shm_mounted = false;
  std::uint64_t shm_bytes = 0;
  std::uint64_t shm_free = 0;  // without what objects of this daemon's name hold
  std::uint64_t shm_held = 0;  // by those objects: a start takes them over or replaces them
  std::string shm_huge;        // value of the mount's `huge` option, "" = none
  std::string shmem_enabled;   // the kernel's choice for shared memory, such as "never" or "force"
  std::uint64_t memory_bytes = kUnlimited;
  std::uint64_t memory_available = kUnlimited;  // of the machine, or less where a cgroup leaves less
  std::uint64_t cgroup_limit = kUnlimited;      // the tightest on the way to the root
  std::string cgroup_path;                      // the file that says so
  std::uint64_t memlock = kUnlimited;           // hard limit, to which the daemon raises itself
  bool may_lock_any = false;                    // CAP_IPC_LOCK: memlock does not apply
  std::uint64_t descriptors = kUnlimited;       // hard limit, to which the daemon raises itself
  SocketDirectory socket_directory;
  bool logind = false;  // systemd-logind manages sessions here
  bool remove_ipc = true;
  bool lingers = false;                  // this user's things stay after the last logout
  bool nvidia_driver = false;            // loaded
  std::optional<std::vector<Gpu>> gpus;  // nothing when nvidia-smi was not asked or does not answer
  int io_uring_errno = 0;                // of io_uring_setup, 0 = allowed or not tried
};

// Where to look. Tests give a directory of their own as `root` and answers of their own for programs.
struct Probes {
  std::string
      root;  // before /dev, /proc, /sys, /etc, /run, /var and the socket's directory; "" = this machine
  // Standard output of a program, or nothing when it could not run or failed.
  std::function<std::optional<std::string>(const std::string& command)> run;
  std::function<int()> io_uring;  // errno of io_uring_setup, 0 = allowed
  static Probes real();
};

// All but the GPUs, which take nvidia-smi up to seconds. Files only; io_uring is tried where it is needed.
Machine measure(const Needs& needs, const Probes& probes);
// Asks nvidia-smi where a driver is loaded, for 10 s at most.
void measure_gpus(const Probes& probes, Machine& machine);

bool has_nvidia_driver(const std::string& root);

// Parts of measure(), for those who look again at the moment that counts.
void measure_room(const Needs& needs, const std::string& root, Machine& machine);
SocketDirectory measure_socket_directory(const Needs& needs, const std::string& root);

}  // namespace hicache::machine
