// Copies between ranks' device memory and the pool, whoever does them: the CPU for host memory, a GPU's copy
// engines for CUDA memory.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "daemon/transfer/planner.hpp"
#include "daemon/transfer/rank_memory.hpp"
#include "shm/protocol.hpp"
#include "shm/status.hpp"
#include "shm/types.hpp"

namespace hicache::daemon {

struct TransferId {
  std::uint64_t value = 0;
  friend bool operator==(TransferId, TransferId) = default;
};

// A load whose pages every rank of the group needs, at device pages of its own.
struct GroupLoad {
  std::uint64_t lease = 0;
  std::uint32_t first = 0;  // position in the request
  std::uint32_t rank = 0;
  std::uint32_t ranks = 0;
  std::uint32_t devices = 0;  // different GPUs that they are on
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
  // load: may be done together with the other ranks'.
  std::optional<GroupLoad> group{};
};

struct TransferDone {
  TransferId id;
  Status status = Status::ok;
  std::uint64_t bytes = 0;
  std::uint32_t verified = 0;         // load: shards whose checksum was compared
  std::vector<PoolOffset> corrupt{};  // load that ended with corrupt: where the checksum was wrong
};

// Told once per transfer, after the last byte has landed or was given up. Called on a transfer thread.
using TransferSink = std::function<void(const TransferDone&)>;

// Thread safety: every method may be called from any thread and never blocks on a copy.
class Transfers {
 public:
  virtual ~Transfers() = default;
  // Queues a transfer. A load without pages completes its fences at once.
  virtual void submit(Transfer transfer) = 0;
  // Ends a transfer that waits for its fence or in the queue (the sink gets timed_out); one that copies may
  // go on or be cut short. An unknown id is ignored.
  virtual void cancel(TransferId id) = 0;
  // Ends every waiting transfer of a client that is gone (the sink gets peer_lost).
  virtual void cancel_client(ClientSlot client, Generation generation) = 0;
};

}  // namespace hicache::daemon
