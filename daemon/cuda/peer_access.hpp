// Which ranks' memory must be open in which GPUs' contexts, so that ranks of a group can load together.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "daemon/cuda/gpu_memory.hpp"
#include "shm/types.hpp"

namespace hicache::daemon {

// Thread-safe. Memory that it knows must be forgotten before it is destroyed.
class PeerAccess {
 public:
  // Opens the memory in the contexts of the GPUs of all known memory of the same namespace, and theirs in its
  // own. What cannot be opened is logged: its ranks load directly. Called by one thread at a time.
  void introduce(GpuMemory& memory, const std::shared_ptr<Gpu>& gpu, const PrefixHash& namespace_digest);
  void forget(const GpuMemory& memory);

 private:
  struct Known {
    GpuMemory* memory;
    std::shared_ptr<Gpu> gpu;
    PrefixHash digest;
  };
  std::mutex mutex_;
  std::vector<Known> known_;
};

}  // namespace hicache::daemon
