#include "daemon/sessions/greeting.hpp"

#include <spdlog/fmt/fmt.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "shm/shared_memory.hpp"

namespace hicache::daemon {
namespace {

// Feature bits that are in force for clients that want them.
std::uint64_t features_of(const Config& config) {
  const bool stages =
      config.transfer.method == TransferMethod::automatic || config.transfer.method == TransferMethod::staged;
  return stages && config.cuda.mode != CudaMode::off ? kFeatureStaging : 0;
}

}  // namespace

Outcome check_hello(const Hello& hello, const DaemonFacts& facts, std::uint32_t peer_pid) {
  if (hello.protocol_min > kProtocolMax || hello.protocol_max < kProtocolMin) {
    return Error{
        Status::version_mismatch,
        fmt::format("daemon '{}' (pid {}) speaks protocol {} to {}, the client (pid {}) speaks {} to {}: use "
                    "builds whose ranges overlap",
                    facts.name, facts.process.pid, kProtocolMin, kProtocolMax, peer_pid, hello.protocol_min,
                    hello.protocol_max),
        0};
  }
  if (hello.role == Role::tool) return success();
  if (hello.engine.empty()) {
    return Error{Status::invalid_argument,
                 "engine is empty, expected the engine instance's id of 1 to 63 bytes", 0};
  }
  if (auto valid = hello.spec.validate(); !valid) return valid;
  if (hello.role == Role::rank && hello.tp_rank >= hello.spec.tp_size) {
    return Error{
        Status::invalid_argument,
        fmt::format("tp_rank is {}, expected less than tp_size {}", hello.tp_rank, hello.spec.tp_size), 0};
  }
  return success();
}

Outcome may_map_pool(const Hello& hello, std::uint32_t uid, const Config& config) {
  const auto& engines = config.pool.map_engines;
  if (std::find(engines.begin(), engines.end(), hello.engine) == engines.end()) {
    return Error{
        Status::not_permitted,
        fmt::format("engine '{}' may not map the pool of daemon '{}', as io_backend kernel does: list it "
                    "in pool.map_engines, or attach with io_backend direct",
                    hello.engine, config.name),
        0};
  }
  const auto& uids = config.pool.map_uids;
  if (uid == 0 || uid == ::geteuid() || std::find(uids.begin(), uids.end(), uid) != uids.end())
    return success();
  return Error{
      Status::not_permitted,
      fmt::format("engine '{}' of user {} may not map the pool of daemon '{}', as io_backend kernel does: "
                  "expected root, user {}, or one listed in pool.map_uids",
                  hello.engine, uid, config.name, ::geteuid()),
      0};
}

Outcome make_channel(Connection& c, const Config::Limits& limits) {
  c.geometry =
      ChannelGeometry::plan(limits.submission_entries, limits.completion_entries, limits.arena_bytes);
  auto fd = create_sealed("hicache-channel", c.geometry.total_bytes);
  if (!fd) return fd.error();
  auto mapping = Mapping::map(fd->get(), c.geometry.total_bytes, Mapping::Access::read_write, true);
  if (!mapping) return mapping.error();
  auto kick = std::make_shared<UniqueFd>(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!kick->valid())
    return Error{Status::system_error, std::string("eventfd: ") + std::strerror(errno), errno};
  c.channel_fd = std::move(*fd);
  c.channel = std::make_shared<Mapping>(std::move(*mapping));
  c.kick = std::move(kick);
  return success();
}

Welcome make_welcome(const Connection& c, const DaemonFacts& facts, const Config& config) {
  Welcome welcome;
  welcome.protocol = c.protocol;
  welcome.features = c.wanted_features & (features_of(config) | (c.read_only ? kFeatureReadOnly : 0));
  if (c.kernel != nullptr) welcome.features |= kFeatureKernel;
  welcome.instance_epoch = facts.instance_epoch;
  welcome.region_bytes = facts.region_bytes;
  welcome.client_slot = c.client.client.value;
  welcome.client_generation = c.client.client_generation.value;
  welcome.group_slot = c.client.group.value;
  welcome.namespace_id = c.client.namespace_id.value;
  welcome.weights_epoch = c.client.weights_epoch;
  welcome.daemon_pid = facts.process.pid;
  welcome.daemon_start_ticks = facts.process.start_ticks;
  welcome.default_deadline_ms = config.limits.operation_deadline_ms;
  welcome.wait_spin_us = config.client_waiting.spin_us;
  welcome.wait_yield_us = config.client_waiting.yield_us;
  welcome.wait_park_ms = config.client_waiting.park_ms;
  welcome.channel = c.geometry;
  return welcome;
}

}  // namespace hicache::daemon
