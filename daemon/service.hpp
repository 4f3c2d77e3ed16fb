// The running daemon: its region, coordinator, transfers, registration and sessions, started and ended in
// order.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "daemon/config.hpp"
#include "daemon/coordinator/coordinator.hpp"
#include "daemon/cuda/cuda_path.hpp"
#include "daemon/integrity/shard_checksums.hpp"
#include "daemon/kernel/kernel_transfers.hpp"
#include "daemon/region_owner.hpp"
#include "daemon/sessions/registration.hpp"
#include "daemon/sessions/session_server.hpp"
#include "daemon/storage/storage_tier.hpp"
#include "daemon/transfer/transfer_engine.hpp"
#include "daemon/transfer/transfer_router.hpp"
#include "shm/status.hpp"

namespace hicache::daemon {

// Used by the main thread only.
class Service {
 public:
  // Clients can attach when it returns.
  static Result<std::unique_ptr<Service>> start(const Config& config, RegionOwner::Start start);
  // Drains with no patience, if drain() was not called, and removes everything from /dev/shm.
  ~Service();
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  // Reads the file again and takes the keys that may change. Logs what changed, or why nothing did.
  void reload(const std::string& config_path);
  // Refuses new sessions and operations, and waits for those in flight, at most drain_ms.
  void drain(std::uint32_t drain_ms);

  [[nodiscard]] const std::string& socket_path() const { return socket_path_; }
  [[nodiscard]] std::uint64_t pool_bytes() const { return region_.pool_bytes(); }
  [[nodiscard]] std::size_t pages() const { return region_.tables().pages.size(); }

 private:
  Service(const Config& config, std::string socket_path, RegionOwner region);
  Outcome begin();

  Config config_;
  std::string socket_path_;
  // Destroyed in reverse: what posts to the coordinator goes before it, and the region last.
  RegionOwner region_;
  ShardChecksums checksums_;
  Coordinator coordinator_;
  std::optional<StorageTier> storage_;
  std::unique_ptr<CudaPath> cuda_;
  std::optional<TransferEngine> transfers_;
  std::optional<KernelTransfers> kernel_;
  std::optional<TransferRouter> router_;
  std::optional<Registration> registration_;
  std::unique_ptr<SessionServer> sessions_;
  std::thread coordinator_thread_;
};

}  // namespace hicache::daemon
