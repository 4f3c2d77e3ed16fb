// Transfer threads: they wait for write fences, execute copy plans, raise layer-ready fences, and report the
// end.
//
// Thread safety: submit and cancel may be called from any thread and never block on a copy. The sink is
// called on a transfer thread, exactly once per transfer, after the last byte has landed or was given up.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "daemon/transfer/device_backend.hpp"
#include "daemon/transfer/planner.hpp"
#include "daemon/transfer/rank_memory.hpp"
#include "shm/status.hpp"
#include "shm/types.hpp"

namespace hicache::daemon {

struct TransferId {
  std::uint64_t value = 0;
  friend bool operator==(TransferId, TransferId) = default;
};

struct Transfer {
  TransferId id;
  std::shared_ptr<const RankMemory> memory;
  Direction direction = Direction::write;
  std::vector<PagePair> pages;
  // write: copy after fences->write[fence] reached fence_value. load: producer slot and value of the layer
  // fences.
  std::uint32_t fence = Submission::kNoFence;
  std::uint32_t fence_value = 0;
  // CLOCK_MONOTONIC; a transfer that has not started by then ends with timed_out. 0 = never.
  std::uint64_t deadline_ns = 0;
};

struct TransferDone {
  TransferId id;
  Status status = Status::ok;
  std::uint64_t bytes = 0;
};

struct TransferOptions {
  std::uint32_t threads = 1;
  std::uint64_t border_bytes = 0;  // no copy crosses it (planner)
  std::uint64_t pool_bytes = 0;    // every pool offset is checked against it
};

class TransferEngine {
 public:
  using Sink = std::function<void(const TransferDone&)>;
  TransferEngine(const TransferOptions& options, std::unique_ptr<DeviceBackend> backend, Sink sink);
  // Ends waiting transfers with shutting_down, waits for running copies, joins the threads.
  ~TransferEngine();
  TransferEngine(const TransferEngine&) = delete;
  TransferEngine& operator=(const TransferEngine&) = delete;

  // Queues a transfer. A load without pages completes its fences at once.
  void submit(Transfer transfer);
  // Ends a transfer that waits for its fence or in the queue (the sink gets timed_out); a running one goes
  // on.
  void cancel(TransferId id);
  // Ends every waiting transfer of a client that is gone (the sink gets peer_lost).
  void cancel_client(ClientSlot client, Generation generation);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Copies with the CPU between mapped rank memory and the mapped pool.
std::unique_ptr<DeviceBackend> make_host_backend(std::uint8_t* pool, std::uint64_t pool_bytes);

}  // namespace hicache::daemon
