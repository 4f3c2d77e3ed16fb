// The daemon's CUDA side as the rest of the daemon sees it; present in every build, with a reason where there
// is no CUDA.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "daemon/config.hpp"
#include "daemon/integrity/shard_checksums.hpp"
#include "daemon/transfer/exchange.hpp"
#include "daemon/transfer/rank_memory.hpp"
#include "daemon/transfer/transfers.hpp"
#include "shm/fd.hpp"
#include "shm/messages.hpp"

namespace hicache::daemon {

struct GpuStatus {
  std::string uuid;
  std::string name;
  std::string state;  // idle (no context yet), serving, broken
  std::uint64_t transfers = 0;
  std::uint64_t failed = 0;
  std::uint64_t copies = 0;
  std::uint64_t enqueue_ns = 0;     // that its thread spent handing copies to the driver
  std::uint64_t staged_chunks = 0;  // that went through ranks' staging memory
  std::uint64_t bytes_written = 0;
  std::uint64_t bytes_loaded = 0;
  std::uint64_t bytes_passed = 0;  // to other GPUs
};

struct CudaStatus {
  bool on = false;
  std::string reason;            // why it is off
  std::string pinning = "idle";  // idle, running, done, failed
  std::uint64_t pinned_bytes = 0;
  std::vector<GpuStatus> gpus;
  ExchangeStatus exchange;
};

// Thread-safe.
class CudaPath {
 public:
  virtual ~CudaPath() = default;
  // Opens a rank's memory. Slow: may make a context, and waits until the pool begins to serve. Preconditions
  // as for the geometry's validate(); `fds` are as many as its descriptors(), and one more for the block
  // where staging is offered. The channel of `fences` stays mapped as long as the import lives.
  virtual Result<std::unique_ptr<DeviceImport>> import(const NamespaceSpec& spec,
                                                       const DeviceGeometry& geometry,
                                                       const std::optional<StagingOffer>& staging,
                                                       std::span<const UniqueFd> fds, FenceBlock* fences) = 0;
  // As Transfers' methods, for the transfers of all GPUs.
  virtual void cancel(TransferId id) = 0;
  virtual void cancel_client(ClientSlot client, Generation generation) = 0;
  [[nodiscard]] virtual CudaStatus status() const = 0;
};

struct CudaOptions {
  CudaMode mode = CudaMode::on_demand;
  TransferMethod method = TransferMethod::automatic;
  std::uint32_t streams = 1;  // of a rank in each direction
  ExchangePolicy exchange;
  std::uint32_t staging_blocks = 64;
  const ShardChecksums* checksums = nullptr;  // outlives the path; nullptr = none are kept
  std::uint32_t checksum_threads = 1;         // for each GPU
  std::uint8_t* pool = nullptr;
  std::uint64_t pool_bytes = 0;
  TransferSink sink;
  // Told, on any thread, how many bytes of the pool from its start on may be used while it is being pinned.
  std::function<void(std::uint64_t)> usable;
};

// Never null, and never fails: without a driver or a GPU it refuses imports and status() says why. Imports
// must be gone, or idle, when the path goes.
std::unique_ptr<CudaPath> make_cuda_path(const CudaOptions& options);

}  // namespace hicache::daemon
