#include "daemon/start_checks.hpp"

#include <spdlog/spdlog.h>
#include <sys/resource.h>

#include "daemon/config_keys.hpp"
#include "daemon/region_owner.hpp"
#include "shm/cgroup_limit.hpp"

namespace hicache::daemon {
namespace {

constexpr std::uint64_t kOwnDescriptors = 64;
constexpr std::uint64_t kDescriptorsPerClient = 4;

Outcome check_memory(const Config& config, const std::string& root) {
  const std::uint64_t wanted = usable_pool_bytes(config) + plan_region(shape_for(config)).total_bytes;
  const CgroupMemoryLimit limit = cgroup_memory_limit(root);
  if (limit.bytes >= wanted) return success();
  return Error{
      Status::no_space,
      fmt::format("the cgroup memory limit of {} ({}) is below the {} that pool and control region reserve: "
                  "raise it (containers: --memory; systemd: MemoryMax=), or lower pool.bytes",
                  format_bytes(limit.bytes), limit.path, format_bytes(wanted)),
      0};
}

Outcome check_descriptors(const Config& config) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return success();
  const std::uint64_t wanted = kOwnDescriptors + kDescriptorsPerClient * config.limits.clients;
  if (limit.rlim_cur >= wanted) return success();
  return Error{Status::no_space,
               fmt::format("the limit of open files is {}, limits.clients {} needs {} at least: raise it "
                           "(LimitNOFILE=, ulimit -n), or lower limits.clients",
                           limit.rlim_cur, config.limits.clients, wanted),
               0};
}

void look_at_locked_memory(const Config& config) {
  rlimit limit{};
  if (config.cuda.mode != CudaMode::at_start || ::getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return;
  if (limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= config.pool.bytes) return;
  spdlog::warn(
      "the limit of locked memory is {}, the pool has {}: without CAP_IPC_LOCK pinning it will be refused "
      "(LimitMEMLOCK=infinity, ulimit -l unlimited, --ulimit memlock=-1)",
      format_bytes(limit.rlim_cur), format_bytes(config.pool.bytes));
}

}  // namespace

Outcome check_start_limits(const Config& config, const std::string& root) {
  if (auto memory = check_memory(config, root); !memory) return memory;
  if (auto descriptors = check_descriptors(config); !descriptors) return descriptors;
  look_at_locked_memory(config);
  return success();
}

}  // namespace hicache::daemon
