// A rank's device memory as the daemon sees it: mapped allocations, geometry, and the fence words of its
// channel.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "shm/channel_layout.hpp"
#include "shm/device_geometry.hpp"
#include "shm/namespace_spec.hpp"
#include "shm/shared_memory.hpp"
#include "shm/types.hpp"

namespace hicache::daemon {

// Shared by the coordinator and the transfers in flight: the mappings stay until the last copy has ended,
// whatever happened to the rank. Immutable after construction, so safe to use from any thread.
struct RankMemory {
  ClientSlot client;
  Generation client_generation;
  NamespaceSpec spec;
  DeviceGeometry geometry;
  std::vector<Mapping> allocations;  // in the geometry's order
  std::shared_ptr<Mapping> channel;  // keeps `fences` mapped
  FenceBlock* fences = nullptr;
  std::uint32_t shard =
      0;  // which shard of a logical page this rank's buffers hold (its rank for MHA, 0 for MLA)
};

}  // namespace hicache::daemon
