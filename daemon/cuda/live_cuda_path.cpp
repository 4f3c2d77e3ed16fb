#include "daemon/cuda/live_cuda_path.hpp"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "daemon/cuda/batched_copy.hpp"
#include "daemon/cuda/gpu_memory.hpp"
#include "daemon/cuda/gpu_transfers.hpp"
#include "daemon/cuda/peer_access.hpp"
#include "daemon/cuda/pool_pinner.hpp"

namespace hicache::daemon {
namespace {

const char* name_of(PoolPinner::State state) {
  switch (state) {
    case PoolPinner::State::idle:
      return "idle";
    case PoolPinner::State::running:
      return "running";
    case PoolPinner::State::done:
      return "done";
    case PoolPinner::State::failed:
      return "failed";
  }
  return "unknown";
}

std::string why_no_exchange(const ExchangePolicy& policy, std::size_t gpus) {
  if (policy.mode == MlaLoad::direct) return "mla.load is \"direct\"";
  return gpus < 2 ? "the daemon sees one GPU" : "";
}

class LiveCudaPath final : public CudaPath {
 public:
  LiveCudaPath(const CudaOptions& options, const CudaDriver& driver, const std::vector<GpuDevice>& devices)
      : options_(options),
        driver_(driver),
        pinner_(options.pool, options.pool_bytes, options.usable),
        exchanges_(options.exchange, why_no_exchange(options.exchange, devices.size())) {
    for (const GpuDevice& device : devices) gpus_.push_back(Served{device, nullptr});
  }

  Outcome serve_all() {
    for (Served& gpu : gpus_) {
      if (auto served = serve(gpu); !served) return served.error();
    }
    return success();
  }

  Result<std::unique_ptr<DeviceImport>> import(const NamespaceSpec& spec, const DeviceGeometry& geometry,
                                               const std::optional<StagingOffer>& staging,
                                               std::span<const UniqueFd> fds, FenceBlock* fences) override {
    const GpuUuid& uuid = geometry.allocations.front().gpu_uuid;
    const auto gpu =
        std::find_if(gpus_.begin(), gpus_.end(), [&](const Served& g) { return g.device.uuid == uuid; });
    if (gpu == gpus_.end()) {
      return Error{Status::not_found, uuid_text(uuid) + " is not visible to the daemon", 0};
    }
    auto transfers = serve(*gpu);
    if (!transfers) return transfers.error();
    if (auto pinned = pinner_.wait_for_first_piece(); !pinned) return pinned.error();
    ImportOptions import_options;
    import_options.method = options_.method;
    import_options.streams = options_.streams;
    import_options.staging_blocks = options_.staging_blocks;
    const bool exchanges = spec.shards() == 1 && spec.tp_size > 1 && exchanges_.status().off_because.empty();
    if (exchanges) import_options.exchanging_gpus = static_cast<std::uint32_t>(gpus_.size());
    auto memory = GpuMemory::import((*transfers)->gpu(), **transfers, spec, geometry, staging, fds, fences,
                                    import_options);
    if (!memory) return memory.error();
    if (exchanges) (*memory)->introduce_to(peers_, spec.digest());
    return std::unique_ptr<DeviceImport>(std::move(*memory));
  }

  void cancel(TransferId id) override {
    for_each_served([&](GpuTransfers& transfers) { transfers.cancel(id); });
  }
  void cancel_client(ClientSlot client, Generation generation) override {
    for_each_served([&](GpuTransfers& transfers) { transfers.cancel_client(client, generation); });
  }

  [[nodiscard]] CudaStatus status() const override {
    CudaStatus status;
    status.on = true;
    status.pinning = name_of(pinner_.state());
    status.pinned_bytes = pinner_.pinned_bytes();
    status.exchange = exchanges_.status();
    const std::lock_guard lock(mutex_);
    for (const Served& gpu : gpus_) {
      GpuStatus& s = status.gpus.emplace_back();
      s.uuid = uuid_text(gpu.device.uuid);
      s.name = gpu.device.name;
      s.state = "idle";
      if (gpu.transfers == nullptr) continue;
      const GpuCounters& counters = gpu.transfers->counters();
      constexpr auto relaxed = std::memory_order_relaxed;
      s.state = counters.broken.load(relaxed) ? "broken" : "serving";
      s.transfers = counters.transfers.load(relaxed);
      s.failed = counters.failed.load(relaxed);
      s.copies = counters.copies.load(relaxed);
      s.enqueue_ns = counters.enqueue_ns.load(relaxed);
      s.staged_chunks = counters.staged_chunks.load(relaxed);
      s.bytes_written = counters.bytes_written.load(relaxed);
      s.bytes_loaded = counters.bytes_loaded.load(relaxed);
      s.bytes_passed = counters.bytes_passed.load(relaxed);
    }
    return status;
  }

 private:
  struct Served {
    GpuDevice device;
    std::unique_ptr<GpuTransfers> transfers;  // null until the first rank; set under mutex_, then constant
  };

  // The transfers of a GPU, made on first use. Called by one thread at a time.
  Result<GpuTransfers*> serve(Served& gpu) {
    if (gpu.transfers != nullptr) return gpu.transfers.get();
    auto context = Gpu::open(driver_, gpu.device);
    if (!context) return context.error();
    pinner_.start(*context);
    GpuPool pool;
    pool.data = options_.pool;
    pool.bytes = options_.pool_bytes;
    pool.border_bytes = PoolPinner::kPieceBytes;
    auto transfers = std::make_unique<GpuTransfers>(*context, pool, pinner_, exchanges_, options_.sink,
                                                    options_.checksums, options_.checksum_threads);
    const std::lock_guard lock(mutex_);
    gpu.transfers = std::move(transfers);
    spdlog::info("serving {} ({})", uuid_text(gpu.device.uuid), gpu.device.name);
    return gpu.transfers.get();
  }

  template <class Call>
  void for_each_served(Call call) {
    const std::lock_guard lock(mutex_);
    for (Served& gpu : gpus_) {
      if (gpu.transfers != nullptr) call(*gpu.transfers);
    }
  }

  const CudaOptions options_;
  const CudaDriver& driver_;
  PoolPinner pinner_;
  ExchangeTable exchanges_;
  const std::shared_ptr<PeerAccess> peers_ = std::make_shared<PeerAccess>();
  mutable std::mutex mutex_;
  std::vector<Served> gpus_;  // goes before the pinner and the exchanges: its threads use them
};

}  // namespace

Result<std::unique_ptr<CudaPath>> make_live_cuda_path(const CudaOptions& options) {
  const auto driver = cuda_driver();
  if (!driver) return driver.error();
  if (options.method == TransferMethod::batched && !can_copy_batches(**driver)) {
    return Error{Status::version_mismatch,
                 "transfer.method is \"batched\", which needs a toolkit and a driver of CUDA 13", 0};
  }
  const auto devices = list_gpus(**driver);
  if (!devices) return devices.error();
  if (devices->empty()) return Error{Status::not_found, "no GPU is visible", 0};
  auto path = std::make_unique<LiveCudaPath>(options, **driver, *devices);
  if (options.mode == CudaMode::at_start) {
    if (auto served = path->serve_all(); !served) return served.error();
  }
  return std::unique_ptr<CudaPath>(std::move(path));
}

}  // namespace hicache::daemon
