// Transfer threads: they wait for write fences, execute copy plans, raise layer-ready fences, and report the
// end.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "daemon/integrity/shard_checksums.hpp"
#include "daemon/transfer/device_backend.hpp"
#include "daemon/transfer/planner.hpp"
#include "daemon/transfer/rank_memory.hpp"
#include "daemon/transfer/transfers.hpp"
#include "shm/status.hpp"
#include "shm/types.hpp"

namespace hicache::daemon {

struct TransferOptions {
  std::uint32_t threads = 1;
  std::uint64_t border_bytes = 0;             // no copy crosses it (planner)
  std::uint64_t pool_bytes = 0;               // every pool offset is checked against it
  const ShardChecksums* checksums = nullptr;  // outlives the engine; nullptr = none are kept
};

class TransferEngine final : public Transfers {
 public:
  using Sink = TransferSink;
  TransferEngine(const TransferOptions& options, std::unique_ptr<DeviceBackend> backend, Sink sink);
  // Ends waiting transfers with shutting_down, waits for running copies, joins the threads.
  ~TransferEngine() override;
  TransferEngine(const TransferEngine&) = delete;
  TransferEngine& operator=(const TransferEngine&) = delete;

  void submit(Transfer transfer) override;
  // A running transfer goes on.
  void cancel(TransferId id) override;
  void cancel_client(ClientSlot client, Generation generation) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Copies with the CPU between mapped rank memory and the mapped pool.
std::unique_ptr<DeviceBackend> make_host_backend(std::uint8_t* pool, std::uint64_t pool_bytes);

}  // namespace hicache::daemon
