// A rank's memory as one GPU's context of the daemon sees it: opened allocations, the rank's fence words, and
// a stream for each direction.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "daemon/cuda/gpu.hpp"
#include "daemon/cuda/gpu_lane.hpp"
#include "daemon/transfer/rank_memory.hpp"
#include "daemon/transfer/schedule.hpp"
#include "daemon/transfer/transfers.hpp"
#include "shm/fd.hpp"

namespace hicache::daemon {

// Immutable after import, except for the lanes, which belong to the GPU's transfer thread.
class GpuMemory final : public DeviceImport {
 public:
  // Opens what the rank exported, and checks it against what the driver says. Precondition: the geometry has
  // been validated and its GPU is this one. `fds`: one for each allocation that has a descriptor, in order.
  // `fences` lies in the rank's channel, which stays mapped until this is gone.
  static Result<std::unique_ptr<GpuMemory>> import(std::shared_ptr<Gpu> gpu, Transfers& copier,
                                                   const NamespaceSpec& spec, const DeviceGeometry& geometry,
                                                   std::span<const UniqueFd> fds, FenceBlock* fences,
                                                   TransferMethod method, std::uint32_t streams);
  // Closes everything. Precondition: no copy is in flight.
  ~GpuMemory() override;

  [[nodiscard]] CUdeviceptr range(std::size_t allocation) const { return ranges_[allocation]; }
  // Device address of a word of the rank's fences; 0 when the GPU cannot write it.
  [[nodiscard]] CUdeviceptr fence_address(const A32& word) const;
  [[nodiscard]] GpuLane& lane(Direction direction) const {
    return *lanes_[direction == Direction::load ? 1 : 0];
  }
  [[nodiscard]] const Schedules& schedules() const { return schedules_; }
  [[nodiscard]] const Gpu& gpu() const { return *gpu_; }

 private:
  // An opened allocation of the driver's.
  struct Base {
    CUdeviceptr address = 0;
    std::uint64_t bytes = 0;
    bool ipc = false;
    std::array<std::uint8_t, 64> handle{};
  };
  GpuMemory(std::shared_ptr<Gpu> gpu, Transfers& copier, Schedules schedules)
      : DeviceImport(copier), gpu_(std::move(gpu)), schedules_(std::move(schedules)) {}
  Outcome open_allocation(const DeviceAllocation& allocation, const UniqueFd* fd);
  Result<Base> open_ipc(const DeviceAllocation& allocation);
  Result<Base> open_descriptor(const DeviceAllocation& allocation, const UniqueFd& fd);
  Outcome open_streams(std::uint32_t streams);
  void register_fences(FenceBlock* fences);

  const std::shared_ptr<Gpu> gpu_;
  const Schedules schedules_;
  std::vector<Base> bases_;
  std::vector<CUdeviceptr> ranges_;  // in the geometry's order
  FenceBlock* fences_ = nullptr;     // while registered
  CUdeviceptr fence_base_ = 0;
  std::array<std::unique_ptr<GpuLane>, 2> lanes_;  // by direction
};

}  // namespace hicache::daemon
