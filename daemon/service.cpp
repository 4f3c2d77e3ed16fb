#include "daemon/service.hpp"

#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <utility>

#include "daemon/config_keys.hpp"
#include "daemon/needs.hpp"
#include "daemon/numa/pool_nodes.hpp"
#include "shm/crash_points.hpp"
#include "shm/machine/checks.hpp"

namespace hicache::daemon {
namespace {

// The default path's directory is ours to make.
Outcome prepare_default_directory(const std::string& socket_path) {
  const std::string directory = socket_path.substr(0, socket_path.rfind('/'));
  if (::mkdir(directory.c_str(), ::geteuid() == 0 ? 0755 : 0700) != 0 && errno != EEXIST) {
    return Error{Status::system_error,
                 "cannot make the socket's directory " + directory + ": " + std::strerror(errno) +
                     "; set socket.path to a place where this user may write",
                 errno};
  }
  return success();
}

// The directory is looked at again: between the start checks and now somebody may have made another one.
Result<std::string> socket_path_for(const Config& config) {
  const machine::Needs needs = needs_of(config);
  if (needs.own_directory) {
    if (auto prepared = prepare_default_directory(needs.socket_path); !prepared) return prepared.error();
  }
  const machine::Check check =
      machine::check_socket(needs, machine::measure_socket_directory(needs, ""), ::geteuid());
  if (check.level != machine::Level::ok) return Error{Status::not_permitted, machine::sentence(check), 0};
  return needs.socket_path;
}

// Measured, not assumed: a pool that was taken over may have been placed under another configuration, and a
// node without room has passed memory on.
std::vector<NumaNode> segment_nodes(const Config& config, const RegionOwner& region) {
  if (config.pool.numa == NumaPlacement::off) return {};
  const std::vector<NumaNode> stripes = nodes_of_stripes(region.pool(), region.pool_bytes());
  auto segments = nodes_of_segments(stripes, region.pool_bytes(), config.pool.segment_bytes);
  if (segments.empty()) return segments;
  std::map<std::uint32_t, std::size_t> counts;
  for (const NumaNode node : stripes) ++counts[node.value];
  std::string text;
  for (const auto& [node, count] : counts)
    text += fmt::format("{}node {}: {}", text.empty() ? "" : ", ", node, count);
  spdlog::info("pool on {} NUMA nodes, in pieces of 1 GiB: {}", counts.size(), text);
  return segments;
}

}  // namespace

Service::Service(const Config& config, std::string socket_path, RegionOwner region)
    : config_(config),
      socket_path_(std::move(socket_path)),
      region_(std::move(region)),
      checksums_(config_.integrity, region_.tables().checksums, region_.pool()),
      coordinator_(CoordinatorOptions{config_, region_.tables(), region_.taken_over(), region_.pool_bytes(),
                                      &checksums_, segment_nodes(config_, region_)}) {}

Result<std::unique_ptr<Service>> Service::start(const Config& config, RegionOwner::Start start) {
  auto socket_path = socket_path_for(config);
  if (!socket_path) return socket_path.error();
  auto region = RegionOwner::create(config, *socket_path, start);
  if (!region) return region.error();
  std::unique_ptr<Service> service(new Service(config, std::move(*socket_path), std::move(*region)));
  if (auto begun = service->begin(); !begun) return begun.error();
  return service;
}

Outcome Service::begin() {
  TransferOptions options;
  options.threads = config_.transfer.threads;
  options.border_bytes = config_.pool.segment_bytes;
  options.pool_bytes = region_.pool_bytes();
  options.checksums = &checksums_;
  transfers_.emplace(options, make_host_backend(region_.pool(), region_.pool_bytes()),
                     [this](const TransferDone& done) { coordinator_.post(done); });
  auto post = [this](CoordinatorRequest request) { coordinator_.post(std::move(request)); };
  CudaOptions cuda;
  cuda.mode = config_.cuda.mode;
  cuda.method = config_.transfer.method;
  cuda.streams = config_.transfer.streams;
  cuda.exchange = ExchangePolicy{config_.mla.load, std::uint64_t{config_.mla.wait_us} * 1000};
  cuda.checksums = &checksums_;
  cuda.checksum_threads = config_.transfer.threads;
  cuda.staging_blocks = config_.transfer.staging_blocks;
  cuda.pool = region_.pool();
  cuda.pool_bytes = region_.pool_bytes();
  cuda.sink = [this](const TransferDone& done) { coordinator_.post(done); };
  cuda.usable = [this](std::uint64_t bytes) { coordinator_.post(UsablePoolRequest{bytes}); };
  cuda_ = make_cuda_path(cuda);
  if (const CudaStatus status = cuda_->status(); status.on) {
    spdlog::info("CUDA on: {} GPUs", status.gpus.size());
  } else {
    spdlog::info("CUDA off: {}", status.reason);
  }
  KernelOptions kernel;
  kernel.pool_bytes = region_.pool_bytes();
  kernel.block_quota = config_.transfer.block_quota;
  kernel.checksums = &checksums_;
  kernel.sink = [this](const TransferDone& done) { coordinator_.post(done); };
  kernel.broken = [this](ClientSlot client, Generation generation, const std::string&) {
    coordinator_.post(BreachRequest{client, generation});
  };
  kernel_.emplace(std::move(kernel));
  for (const PoolMapper& mapper : coordinator_.pool_mappers()) {
    kernel_->await_end(mapper.process,
                       [this, slot = mapper.client] { coordinator_.post(MapperGoneRequest{slot}); });
  }
  router_.emplace(*transfers_, *cuda_, *kernel_);
  coordinator_.set_transfers(&*router_);
  coordinator_.set_cuda(cuda_.get());
  registration_.emplace(post, *cuda_);
  storage_.emplace(config_.storage,
                   StoragePool{reinterpret_cast<std::byte*>(region_.pool()), region_.pool_bytes(),
                               config_.pool.segment_bytes},
                   &checksums_, [this] { coordinator_.post(StorageNews{}); });
  if (!config_.storage.backend.empty()) {
    const auto settings = config_.storage.settings.find(config_.storage.backend);
    auto attached = storage_->attach(config_.storage.backend, settings == config_.storage.settings.end()
                                                                  ? StorageTier::Settings::object()
                                                                  : settings->second);
    if (!attached) return attached;
  }
  coordinator_.set_storage(&*storage_);
  coordinator_thread_ = std::thread([this] { coordinator_.run(); });
  region_.publish();
  HICACHE_CRASH_POINT(start_published);

  SessionServerOptions sessions;
  sessions.config = config_;
  sessions.socket_path = socket_path_;
  sessions.control_fd = region_.control_read_only_fd();
  sessions.pool_fd = region_.pool_fd();
  sessions.region_bytes = region_.region_bytes();
  sessions.instance_epoch = region_.instance_epoch();
  auto started = SessionServer::start(sessions, post, *registration_);
  if (!started) return started.error();
  sessions_ = std::move(*started);
  region_.settle();
  return success();
}

Service::~Service() {
  drain(0);
}

void Service::drain(std::uint32_t drain_ms) {
  if (!coordinator_thread_.joinable()) return;
  region_.mark_draining();
  if (sessions_) sessions_->drain();
  coordinator_.stop(drain_ms);
  coordinator_thread_.join();
  // It answers on connections of the sessions and works on the pool.
  storage_->stop();
}

void Service::reload(const std::string& config_path) {
  const auto next = load_config(config_path);
  if (!next) {
    spdlog::error("configuration not reloaded: {}", next.error().message);
    return;
  }
  Config taken = config_;
  if (auto applied = apply_reload(taken, *next); !applied) {
    spdlog::error("configuration not reloaded: {}", applied.error().message);
    return;
  }
  std::string changes;
  for (const ConfigKey& key : config_keys()) {
    const std::string before = key.get(config_).dump();
    const std::string after = key.get(taken).dump();
    if (before != after)
      changes += fmt::format("{}{}: {} -> {}", changes.empty() ? "" : ", ", key.path, before, after);
  }
  config_ = taken;
  spdlog::set_level(spdlog::level::from_str(config_.log.level));
  coordinator_.post(ReloadRequest{config_});
  sessions_->reload(config_);
  spdlog::info("configuration reloaded: {}", changes.empty() ? "nothing changed" : changes);
}

}  // namespace hicache::daemon
