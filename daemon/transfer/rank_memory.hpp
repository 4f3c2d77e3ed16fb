// A rank's device memory as the daemon sees it: mapped allocations, geometry, and the fence words of its
// channel.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "daemon/kernel/kernel_link.hpp"
#include "shm/channel_layout.hpp"
#include "shm/device_geometry.hpp"
#include "shm/fd.hpp"
#include "shm/namespace_spec.hpp"
#include "shm/shared_memory.hpp"
#include "shm/types.hpp"

namespace hicache::daemon {

class Transfers;

// What a device's path holds of a rank's memory: opened handles, streams. Destroyed with the rank's memory.
struct DeviceImport {
  DeviceImport(Transfers& t, std::uint32_t d, NumaNode n = NumaNode::none())
      : transfers(&t), device_index(d), node(n) {}
  virtual ~DeviceImport() = default;
  DeviceImport(const DeviceImport&) = delete;
  DeviceImport& operator=(const DeviceImport&) = delete;
  // Whether copies from memory on another device can write into this one.
  [[nodiscard]] virtual bool reachable_from(std::uint32_t other) const = 0;

  Transfers* const transfers;        // who copies from and to this memory
  const std::uint32_t device_index;  // which of the daemon's devices it is on
  const NumaNode node;               // the NUMA node nearest to that device, or none
  // Producer slots whose newest load is done together with other ranks and has not ended: the slot's next
  // load waits, so that its words are raised in order. Set by the device's transfer thread; cleared with
  // release by whoever ends the load, after its words were raised, and read with acquire.
  mutable std::array<std::atomic<bool>, kProducerSlots> exchanging{};
};

// Shared by the coordinator and the transfers in flight: the mappings stay until the last copy has ended,
// whatever happened to the rank. Immutable after construction, so safe to use from any thread.
struct RankMemory {
  ClientSlot client;
  Generation client_generation;
  NamespaceSpec spec;
  DeviceGeometry geometry;
  std::vector<Mapping> allocations;  // host memory, in the geometry's order; empty for a device's
  std::shared_ptr<Mapping> channel;  // keeps `fences` mapped
  FenceBlock* fences = nullptr;
  std::uint32_t shard =
      0;  // which shard of a logical page this rank's buffers hold (its rank for MHA, 0 for MLA)
  // Of device memory: the session's socket, closed after the memory was. A rank must not free exported memory
  // before, so its close() waits for the end of the connection.
  UniqueFd session;
  std::shared_ptr<KernelLink>
      kernel;  // io_backend kernel: the rank moves its pages itself; nothing is mapped
  std::unique_ptr<DeviceImport> device;  // null for host memory. Last: it goes before the channel does
};

}  // namespace hicache::daemon
