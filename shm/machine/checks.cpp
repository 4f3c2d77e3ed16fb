// Judges a machine: what is there, whether a daemon can live with it, and what to do when it can't.
#include "shm/machine/checks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "shm/types.hpp"

namespace hicache::machine {
namespace {

constexpr std::uint32_t kFirstUserUid = 1000;     // logind leaves system users alone
constexpr std::uint64_t kOwnMemory = 256 * kMiB;  // the daemon's heap, stacks and page tables, generously
constexpr std::uint64_t kOwnDescriptors = 64;
constexpr std::uint64_t kDescriptorsPerClient = 4;
constexpr std::uint64_t kAllocationsPerClient = 64;  // device allocations of a usual engine
constexpr std::size_t kMaxSocketPath = 107;

std::string bytes_text(std::uint64_t bytes) {
  if (bytes == kUnlimited) return "unlimited";
  constexpr std::uint64_t kTiB = 1024 * kGiB;
  for (const auto& [unit, name] : {std::pair(kTiB, "TiB"), std::pair(kGiB, "GiB"), std::pair(kMiB, "MiB")}) {
    if (bytes < unit) continue;
    if (bytes % unit == 0) return fmt::format("{} {}", bytes / unit, name);
    return fmt::format("{:.1f} {}", static_cast<double>(bytes) / static_cast<double>(unit), name);
  }
  return fmt::format("{:.1f} KiB", static_cast<double>(bytes) / static_cast<double>(kKiB));
}

Check ok(std::string name, std::string found) {
  return {std::move(name), Level::ok, std::move(found), ""};
}
Check degraded(std::string name, std::string found, std::string remedy) {
  return {std::move(name), Level::degraded, std::move(found), std::move(remedy)};
}
Check refused(std::string name, std::string found, std::string remedy) {
  return {std::move(name), Level::refused, std::move(found), std::move(remedy)};
}

Check check_cgroup(const Needs& needs, const Machine& m) {
  const char* name = "cgroup memory limit";
  if (m.cgroup_limit == kUnlimited) return ok(name, "none");
  const std::string found =
      fmt::format("{} ({}), pool and control region need {}", bytes_text(m.cgroup_limit), m.cgroup_path,
                  bytes_text(needs.reserved_bytes()));
  const std::string remedy =
      "raise the limit (containers: --memory; systemd: MemoryMax=), or lower pool.bytes";
  if (m.cgroup_limit < needs.reserved_bytes()) return refused(name, found, remedy);
  if (m.cgroup_limit - needs.reserved_bytes() < kOwnMemory)
    return degraded(name, found + ": too tight for anything beside it", remedy);
  return ok(name, found);
}

Check check_memlock(const Needs& needs, const Machine& m) {
  const char* name = "locked memory";
  if (needs.gpus == GpuNeed::none) return ok(name, "not needed: cuda.mode is off");
  if (m.may_lock_any) return ok(name, "any amount (CAP_IPC_LOCK)");
  const std::string found =
      fmt::format("limit {}, pool {}", bytes_text(m.memlock), bytes_text(needs.pool_bytes));
  if (m.memlock >= needs.pool_bytes) return ok(name, found);
  // The pool is pinned for GPUs: without one, and without the wish for one, there is nothing to warn about.
  if (!m.nvidia_driver && needs.gpus != GpuNeed::at_start) return ok(name, found + "; no GPU driver here");
  return degraded(
      name, found + ": pinning the pool for GPUs may be refused",
      "raise it: LimitMEMLOCK=infinity (systemd), ulimit -l unlimited, --ulimit memlock=-1 (containers)");
}

Check check_descriptors(const Needs& needs, const Machine& m) {
  const char* name = "open files";
  const std::uint64_t least = kOwnDescriptors + kDescriptorsPerClient * needs.clients;
  const std::uint64_t usual = least + kAllocationsPerClient * needs.clients;
  const std::string limit = m.descriptors == kUnlimited ? "unlimited" : std::to_string(m.descriptors);
  const std::string remedy = fmt::format(
      "raise the hard limit to {} (LimitNOFILE=, ulimit -n, containers: --ulimit nofile=), or lower "
      "limits.clients",
      usual);
  const std::string found =
      fmt::format("hard limit {}, limits.clients {} needs {} at least", limit, needs.clients, least);
  if (m.descriptors < least) return refused(name, found, remedy);
  if (m.descriptors < usual) {
    return degraded(
        name, fmt::format("{}, and {} with {} device allocations each", found, usual, kAllocationsPerClient),
        remedy);
  }
  return ok(name, found);
}

// The pool's mapping asks for huge pages (madvise), so `advise` is enough.
Check check_huge_pages(const Needs& needs, const Machine& m) {
  const char* name = "huge pages";
  const bool by_mount = m.shm_huge == "always" || m.shm_huge == "within_size" || m.shm_huge == "advise";
  const bool possible = m.shmem_enabled == "force" || (by_mount && m.shmem_enabled != "deny");
  if (needs.huge_pages == HugePageNeed::none)
    return ok(name, std::string("pool.huge_pages is off") + (possible ? "; this machine has them" : ""));
  if (possible) {
    return ok(name, m.shmem_enabled == "force" ? "forced by the kernel's shmem_enabled"
                                               : "/dev/shm is mounted with huge=" + m.shm_huge);
  }
  const bool required = needs.huge_pages == HugePageNeed::required;
  const std::string found =
      fmt::format("pool.huge_pages is \"{}\", but /dev/shm has huge={} and shmem_enabled is {}{}",
                  required ? "require" : "prefer", m.shm_huge.empty() ? "never" : m.shm_huge,
                  m.shmem_enabled.empty() ? "not supported" : m.shmem_enabled,
                  required ? "" : ": the pool gets 4 KiB pages");
  std::string remedy =
      m.shmem_enabled == "deny"
          ? "write never to /sys/kernel/mm/transparent_hugepage/shmem_enabled and mount with huge=advise"
          : "mount -o remount,huge=advise /dev/shm";
  if (!required) return degraded(name, found, remedy);
  return refused(name, found, remedy + ", or set pool.huge_pages to \"prefer\"");
}

Check check_remove_ipc(const Machine& m) {
  const char* name = "RemoveIPC";
  if (!m.logind) return ok(name, "no systemd-logind here");
  if (!m.remove_ipc) return ok(name, "RemoveIPC=no");
  if (m.uid < kFirstUserUid) return ok(name, fmt::format("does not touch uid {} (a system user)", m.uid));
  if (m.lingers) return ok(name, "this user lingers");
  return degraded(
      name, fmt::format("systemd-logind removes the shared memory of uid {} at its last logout", m.uid),
      "run the daemon as a system user, or loginctl enable-linger, or RemoveIPC=no in logind.conf");
}

Check check_io_uring(const Needs& needs, const Machine& m) {
  const char* name = "io_uring";
  if (needs.io_uring == IoUringNeed::none) return ok(name, "not used by this configuration");
  if (m.io_uring_errno == 0) return ok(name, "allowed");
  const std::string found = fmt::format("refused: {}", std::strerror(m.io_uring_errno));
  const std::string remedy = "kernel.io_uring_disabled=0, or a seccomp profile that allows it";
  if (needs.io_uring == IoUringNeed::required)
    return refused(name, found + ", and storage.file.engine is \"io_uring\"",
                   remedy + ", or set storage.file.engine to \"auto\"");
  return degraded(name, found + ": storage uses threads instead", remedy);
}

}  // namespace

const char* to_text(Level level) {
  switch (level) {
    case Level::ok:
      return "ok";
    case Level::degraded:
      return "degraded";
    case Level::refused:
      return "refused";
  }
  return "?";
}

std::string sentence(const Check& check) {
  return check.remedy.empty() ? fmt::format("{}: {}", check.name, check.found)
                              : fmt::format("{}: {} -> {}", check.name, check.found, check.remedy);
}

Check check_shm(const Needs& needs, const Machine& m) {
  const char* name = "/dev/shm";
  if (!m.shm_mounted) return refused(name, "not there", "mount a tmpfs at /dev/shm");
  const std::uint64_t wanted = needs.reserved_bytes();
  const std::uint64_t usable = m.shm_free + m.shm_held;
  const std::string found = fmt::format(
      "{} free of {}{}, pool and control region need {}", bytes_text(m.shm_free), bytes_text(m.shm_bytes),
      m.shm_held == 0 ? "" : ", " + bytes_text(m.shm_held) + " of this daemon", bytes_text(wanted));
  if (usable >= wanted) return ok(name, found);
  return refused(
      name, found,
      fmt::format("lower pool.bytes, remove what is left there (ls /dev/shm), or enlarge it: mount -o "
                  "remount,size={} /dev/shm (containers: --shm-size)",
                  m.shm_bytes - std::min(m.shm_bytes, usable) + align_up(wanted, kMiB)));
}

Check check_memory(const Needs& needs, const Machine& m) {
  const char* name = "memory";
  const std::uint64_t wanted = needs.reserved_bytes();
  if (m.memory_bytes < wanted) {
    return refused(name,
                   fmt::format("this machine has {}, pool and control region need {}",
                               bytes_text(m.memory_bytes), bytes_text(wanted)),
                   "lower pool.bytes");
  }
  if (m.shm_held >= wanted)
    return ok(name, fmt::format("{} are reserved already by an earlier or running daemon of this name",
                                bytes_text(m.shm_held)));
  if (m.memory_available == kUnlimited)
    return degraded(name, "what is available can't be read, pool.memory_reserve is not looked after",
                    "mount /proc");
  // Kept apart from the sum: both come from a configuration and may be huge.
  const std::uint64_t usable = m.memory_available - std::min(m.memory_available, needs.memory_reserve);
  const std::string found =
      fmt::format("{} available, pool.memory_reserve keeps {} of them, pool and control region need {}",
                  bytes_text(m.memory_available), bytes_text(needs.memory_reserve), bytes_text(wanted));
  if (usable >= wanted - m.shm_held) return ok(name, found);
  return refused(name, found,
                 "lower pool.bytes or pool.memory_reserve, end something else before the start, or raise the "
                 "memory limit of the control group");
}

Check check_socket(const Needs& needs, const SocketDirectory& d, std::uint32_t uid) {
  const char* name = "socket directory";
  if (needs.socket_path.empty() || needs.socket_path.size() > kMaxSocketPath) {
    return refused(name,
                   fmt::format("socket path has {} bytes, 1 to {} are possible", needs.socket_path.size(),
                               kMaxSocketPath),
                   "set a shorter socket.path");
  }
  if (!d.exists) {
    if (d.usable) return ok(name, d.path + " will be made");
    return refused(name, fmt::format("{} can't be used: {}", d.path, d.unusable_cause),
                   "make it, or set socket.path to a place where this user may write");
  }
  if (!d.is_directory)
    return refused(name, d.path + " is no directory", "remove it, or set another socket.path");
  if (d.others_write || (needs.own_directory && d.owner != uid)) {
    if (d.owner != uid) {
      return refused(name,
                     fmt::format("{} belongs to uid {}, the daemon runs as uid {}", d.path, d.owner, uid),
                     "remove it or give it to the daemon's user, or set socket.path");
    }
    return refused(name, d.path + " can be written by group or others: anybody could take the socket's place",
                   "chmod go-w " + d.path);
  }
  if (!d.usable) {
    return refused(
        name, fmt::format("uid {} may not write to {} of uid {}: {}", uid, d.path, d.owner, d.unusable_cause),
        "change its owner or mode, or set another socket.path");
  }
  if (d.owner != uid && d.owner != 0) {
    return refused(name, fmt::format("{} belongs to uid {}, the daemon runs as uid {}", d.path, d.owner, uid),
                   "give it to the daemon's user");
  }
  return ok(name, d.path);
}

Check check_gpus(const Needs& needs, const Machine& m) {
  const char* name = "NVIDIA GPUs";
  if (needs.gpus == GpuNeed::none) return ok(name, "not used: cuda.mode is off");
  if (!m.nvidia_driver && needs.gpus == GpuNeed::at_start)
    return degraded(name,
                    "no driver is loaded, but cuda.mode is \"at_start\": only the host backend works here",
                    "load the driver, or set cuda.mode to \"off\"");
  if (!m.nvidia_driver) return ok(name, "none: only the host backend works here");
  if (!m.gpus)
    return degraded(name, "a driver is loaded, but nvidia-smi does not answer",
                    "make nvidia-smi work for this user");
  if (m.gpus->empty())
    return degraded(name, "a driver is loaded, but no GPU is visible", "give the container a GPU (--gpus)");
  for (std::size_t i = 0; i < m.gpus->size(); ++i) {
    const Gpu& gpu = (*m.gpus)[i];
    if (gpu.compute_mode == "Exclusive_Process" || gpu.compute_mode == "Prohibited") {
      return degraded(
          name,
          fmt::format(
              "GPU {} ({}) is in compute mode {}: its ranks are turned away, because the daemon needs "
              "a context beside the engine's",
              i, gpu.name, gpu.compute_mode),
          fmt::format("nvidia-smi -i {} -c DEFAULT", i));
    }
  }
  for (std::size_t i = 0; i < m.gpus->size(); ++i) {
    const Gpu& gpu = (*m.gpus)[i];
    if (gpu.mig) {
      return degraded(
          name,
          fmt::format("GPU {} ({}) is in MIG mode: its memory can only be shared inside one instance", i,
                      gpu.name),
          fmt::format("give daemon and engine the same MIG instance, or nvidia-smi -i {} -mig 0", i));
    }
  }
  return ok(name, fmt::format("{} visible ({}), shareable", m.gpus->size(), m.gpus->front().name));
}

std::vector<Check> examine(const Needs& needs, const Machine& m) {
  return {check_shm(needs, m),
          check_memory(needs, m),
          check_cgroup(needs, m),
          check_memlock(needs, m),
          check_descriptors(needs, m),
          check_huge_pages(needs, m),
          check_socket(needs, m.socket_directory, m.uid),
          check_remove_ipc(m),
          check_io_uring(needs, m)};
}

}  // namespace hicache::machine
