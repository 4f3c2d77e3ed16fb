// Judges a machine: what is there, whether a daemon can live with it, and what to do when it can't.
#include <fmt/format.h>

#include <cstring>

#include "daemon/region_owner.hpp"
#include "shm/region.hpp"
#include "tools/ctl/doctor.hpp"

namespace hicache::ctl {
namespace {

constexpr std::uint32_t kFirstUserUid = 1000;     // logind leaves system users alone
constexpr std::uint64_t kOwnMemory = 256 * kMiB;  // the daemon's heap, stacks and page tables, generously
constexpr std::uint64_t kOwnDescriptors = 64;
constexpr std::uint64_t kDescriptorsPerClient = 4;
constexpr std::uint64_t kAllocationsPerClient = 64;  // device allocations of a usual engine
constexpr std::size_t kMaxSocketPath = 107;

std::string format_bytes(std::uint64_t bytes) {
  const auto n = static_cast<double>(bytes);
  return bytes >= kGiB ? fmt::format("{:.1f} GiB", n / static_cast<double>(kGiB))
                       : fmt::format("{:.1f} MiB", n / static_cast<double>(kMiB));
}

std::string bytes_or_unlimited(std::uint64_t bytes) {
  return bytes == kUnlimited ? "unlimited" : format_bytes(bytes);
}

Check ok(std::string name, std::string found) {
  return {std::move(name), Level::ok, std::move(found), ""};
}
Check warn(std::string name, std::string found, std::string remedy) {
  return {std::move(name), Level::warn, std::move(found), std::move(remedy)};
}
Check fail(std::string name, std::string found, std::string remedy) {
  return {std::move(name), Level::fail, std::move(found), std::move(remedy)};
}

Check check_shm(std::uint64_t wanted, const Machine& m) {
  const char* name = "/dev/shm";
  if (!m.shm_mounted) return fail(name, "not there", "mount a tmpfs at /dev/shm");
  const std::string found = fmt::format("{} free of {}, the daemon needs {}", format_bytes(m.shm_free),
                                        format_bytes(m.shm_bytes), format_bytes(wanted));
  if (m.shm_free >= wanted) return ok(name, found);
  return fail(
      name, found,
      fmt::format("lower pool.bytes, remove what is left there, or enlarge it: mount -o remount,size={} "
                  "/dev/shm (containers: --shm-size)",
                  m.shm_bytes - m.shm_free + align_up(wanted, kMiB)));
}

Check check_memory(std::uint64_t wanted, const Machine& m) {
  const char* name = "memory";
  const std::string found =
      fmt::format("{} available of {}, the daemon needs {}", format_bytes(m.memory_available),
                  format_bytes(m.memory_bytes), format_bytes(wanted));
  if (m.memory_bytes < wanted) return fail(name, found, "lower pool.bytes: this machine is too small for it");
  if (m.memory_available < wanted)
    return warn(name, found, "end something else before the start, or lower pool.bytes");
  return ok(name, found);
}

Check check_cgroup(std::uint64_t wanted, const Machine& m) {
  const char* name = "cgroup memory limit";
  if (m.cgroup_limit == kUnlimited) return ok(name, "none");
  const std::string found = fmt::format("{} ({}), the daemon needs {}", format_bytes(m.cgroup_limit),
                                        m.cgroup_path, format_bytes(wanted));
  const std::string remedy =
      "raise the limit (containers: --memory; systemd: MemoryMax=), or lower pool.bytes";
  if (m.cgroup_limit < wanted) return fail(name, found, remedy);
  if (m.cgroup_limit < wanted + kOwnMemory)
    return warn(name, found + ": too tight for anything beside it", remedy);
  return ok(name, found);
}

Check check_memlock(std::uint64_t pool, const Machine& m) {
  const char* name = "locked memory";
  if (m.may_lock_any) return ok(name, "any amount (CAP_IPC_LOCK)");
  const std::string found =
      fmt::format("limit {}, pool {}", bytes_or_unlimited(m.memlock), format_bytes(pool));
  if (m.memlock >= pool) return ok(name, found);
  return warn(
      name, found + ": pinning the pool may be refused",
      "raise it: LimitMEMLOCK=infinity (systemd), ulimit -l unlimited, --ulimit memlock=-1 (containers)");
}

Check check_descriptors(const daemon::Config& config, const Machine& m) {
  const char* name = "open files";
  const std::uint64_t least = kOwnDescriptors + kDescriptorsPerClient * config.limits.clients;
  const std::uint64_t usual = least + kAllocationsPerClient * config.limits.clients;
  const std::string limit = m.descriptors == kUnlimited ? "unlimited" : std::to_string(m.descriptors);
  const std::string remedy = fmt::format(
      "raise the hard limit to {} (LimitNOFILE=, ulimit -n), or lower "
      "limits.clients",
      usual);
  const std::string found =
      fmt::format("hard limit {}, {} clients need {} at least", limit, config.limits.clients, least);
  if (m.descriptors < least) return fail(name, found, remedy);
  if (m.descriptors < usual) {
    return warn(
        name, fmt::format("{}, and {} with {} device allocations each", found, usual, kAllocationsPerClient),
        remedy);
  }
  return ok(name, found);
}

Check check_huge_pages(const Machine& m) {
  const char* name = "huge pages";
  const bool by_mount = m.shm_huge == "always" || m.shm_huge == "within_size";
  if (m.shmem_enabled == "force" || (by_mount && m.shmem_enabled != "deny")) {
    return ok(name, by_mount ? "/dev/shm is mounted with huge=" + m.shm_huge
                             : "forced by the kernel's shmem_enabled");
  }
  const std::string found = fmt::format(
      "/dev/shm has huge={}, shmem_enabled is {}: the pool will use 4 KiB pages",
      m.shm_huge.empty() ? "never" : m.shm_huge, m.shmem_enabled.empty() ? "not supported" : m.shmem_enabled);
  return warn(
      name, found,
      m.shmem_enabled == "deny"
          ? "write never to /sys/kernel/mm/transparent_hugepage/shmem_enabled and mount with huge=within_size"
          : "mount -o remount,huge=within_size /dev/shm");
}

Check check_socket(const Machine& m) {
  const char* name = "socket directory";
  const SocketDirectory& d = m.socket_directory;
  if (m.socket_path.size() > kMaxSocketPath) {
    return fail(name,
                fmt::format("socket path has {} bytes, at most {} are possible", m.socket_path.size(),
                            kMaxSocketPath),
                "set a shorter socket.path");
  }
  if (!d.exists) {
    if (d.usable) return ok(name, d.path + " will be made");
    return fail(name, d.path + " does not exist",
                "make it, or set socket.path to a place where this user may write");
  }
  if (!d.is_directory)
    return fail(name, d.path + " is no directory", "remove it, or set another socket.path");
  if (!d.usable) {
    return fail(name, fmt::format("uid {} may not write to {} of uid {}", m.uid, d.path, d.owner),
                "change its owner or mode, or set another socket.path");
  }
  if (d.others_write) {
    return fail(name, d.path + " can be written by group or others: anybody could take the socket's place",
                "chmod go-w " + d.path);
  }
  if (d.owner != m.uid && d.owner != 0) {
    return fail(name,
                fmt::format("{} belongs to uid {}, the daemon would run as uid {}", d.path, d.owner, m.uid),
                "give it to the daemon's user");
  }
  return ok(name, d.path);
}

Check check_remove_ipc(const Machine& m) {
  const char* name = "RemoveIPC";
  if (!m.logind) return ok(name, "no systemd-logind here");
  if (!m.remove_ipc) return ok(name, "RemoveIPC=no");
  if (m.uid < kFirstUserUid) return ok(name, fmt::format("does not touch uid {} (a system user)", m.uid));
  if (m.lingers) return ok(name, "this user lingers");
  return warn(name,
              fmt::format("systemd-logind removes the shared memory of uid {} at its last logout", m.uid),
              "run the daemon as a system user, or loginctl enable-linger, or RemoveIPC=no in logind.conf");
}

Check check_gpus(const Machine& m) {
  const char* name = "NVIDIA GPUs";
  if (!m.nvidia_driver) return ok(name, "none: only the host backend works here");
  if (!m.gpus)
    return warn(name, "a driver is loaded, but nvidia-smi does not answer",
                "make nvidia-smi work for this user");
  if (m.gpus->empty())
    return warn(name, "a driver is loaded, but no GPU is visible", "give the container a GPU (--gpus)");
  for (std::size_t i = 0; i < m.gpus->size(); ++i) {
    const Gpu& gpu = (*m.gpus)[i];
    if (gpu.compute_mode == "Exclusive_Process" || gpu.compute_mode == "Prohibited") {
      return fail(
          name,
          fmt::format("GPU {} ({}) is in compute mode {}: the daemon needs a context beside the engine's", i,
                      gpu.name, gpu.compute_mode),
          fmt::format("nvidia-smi -i {} -c DEFAULT", i));
    }
  }
  for (std::size_t i = 0; i < m.gpus->size(); ++i) {
    const Gpu& gpu = (*m.gpus)[i];
    if (gpu.mig) {
      return warn(name,
                  fmt::format("GPU {} ({}) is in MIG mode: its memory can only be shared inside one instance",
                              i, gpu.name),
                  fmt::format("give daemon and engine the same MIG instance, or nvidia-smi -i {} -mig 0", i));
    }
  }
  return ok(name, fmt::format("{} visible ({}), shareable", m.gpus->size(), m.gpus->front().name));
}

Check check_io_uring(const Machine& m) {
  const char* name = "io_uring";
  if (m.io_uring_errno == 0) return ok(name, "allowed");
  return warn(
      name,
      fmt::format("refused: {}; asynchronous file access is not possible", std::strerror(m.io_uring_errno)),
      "kernel.io_uring_disabled=0, or a seccomp profile that allows it; not needed for memory alone");
}

}  // namespace

std::vector<Check> examine(const daemon::Config& config, const Machine& m) {
  const std::uint64_t pool = daemon::usable_pool_bytes(config);
  const std::uint64_t wanted = pool + plan_region(daemon::shape_for(config)).total_bytes;
  return {check_shm(wanted, m),   check_memory(wanted, m),      check_cgroup(wanted, m),
          check_memlock(pool, m), check_descriptors(config, m), check_huge_pages(m),
          check_socket(m),        check_remove_ipc(m),          check_gpus(m),
          check_io_uring(m)};
}

}  // namespace hicache::ctl
