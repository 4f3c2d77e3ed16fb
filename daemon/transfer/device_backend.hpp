// What a kind of device must be able to do. The host backend copies with the CPU; the CUDA backend will use
// the copy engines. A backend knows nothing of pages, leases or groups: it executes runs in order.
#pragma once

#include <cstdint>
#include <span>

#include "daemon/transfer/planner.hpp"
#include "daemon/transfer/rank_memory.hpp"
#include "shm/status.hpp"

namespace hicache::daemon {

class DeviceBackend {
 public:
  virtual ~DeviceBackend() = default;
  // Copies one run between the rank's memory and the pool. Returns when the bytes have landed. Called on a
  // transfer thread; must be safe for several threads and different ranks at once.
  virtual Status copy(const RankMemory& memory, Direction direction, const CopyRun& run) = 0;
};

}  // namespace hicache::daemon
