// A rank's memory as one GPU's context of the daemon sees it: opened allocations, the rank's fence words, and
// streams for each direction. Memory that other GPUs may write into is opened in their contexts too: a copy
// between pointers that were each opened in their own context would go through the host.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "daemon/cuda/gpu.hpp"
#include "daemon/cuda/gpu_lane.hpp"
#include "daemon/transfer/rank_memory.hpp"
#include "daemon/transfer/schedule.hpp"
#include "daemon/transfer/staging_ring.hpp"
#include "daemon/transfer/transfers.hpp"
#include "shm/fd.hpp"
#include "shm/messages.hpp"

namespace hicache::daemon {

class PeerAccess;

// How a rank's memory is imported.
struct ImportOptions {
  TransferMethod method = TransferMethod::automatic;
  std::uint32_t streams = 1;  // in each direction
  std::uint32_t staging_blocks = 64;
  // How many GPUs there are when ranks of the namespace load together, else 0. Their layers are announced by
  // the CPU: no stream sees what other GPUs bring.
  std::uint32_t exchanging_gpus = 0;
};

// Immutable after import, except for the lanes and the staging ring, which belong to the GPU's transfer
// thread, and the views, which are added by the one thread that imports.
class GpuMemory final : public DeviceImport {
 public:
  // Opens what the rank exported, and checks it against what the driver says. Precondition: the geometry has
  // been validated and its GPU is this one. `fds`: one for each allocation that has a descriptor, in order,
  // and the staging block where staging is offered. `fences` lies in the rank's channel, which stays mapped
  // until this is gone.
  static Result<std::unique_ptr<GpuMemory>> import(std::shared_ptr<Gpu> gpu, Transfers& copier,
                                                   const NamespaceSpec& spec, const DeviceGeometry& geometry,
                                                   const std::optional<StagingOffer>& staging,
                                                   std::span<const UniqueFd> fds, FenceBlock* fences,
                                                   const ImportOptions& options);
  // Closes everything. Precondition: no copy is in flight.
  ~GpuMemory() override;

  [[nodiscard]] CUdeviceptr range(std::size_t allocation) const { return ranges_[allocation].address; }
  // Takes part in the exchange between GPUs until it is destroyed. Called by the thread that imports.
  void introduce_to(const std::shared_ptr<PeerAccess>& peers, const PrefixHash& namespace_digest);
  // Opens the memory in another GPU's context, once. Called by the thread that imports.
  Outcome open_in(const std::shared_ptr<Gpu>& other);
  [[nodiscard]] bool reachable_from(std::uint32_t other) const override {
    return other < views_.size() && views_[other].load(std::memory_order_acquire) != nullptr;
  }
  // Where the range lies in another GPU's context. Precondition: reachable_from(other).
  [[nodiscard]] CUdeviceptr range_in(std::uint32_t other, std::size_t allocation) const {
    return views_[other].load(std::memory_order_acquire)->ranges[allocation];
  }
  // The stream for copies from this memory to another GPU's. Null when there is no exchange.
  [[nodiscard]] CUstream pass_stream(std::uint32_t other) const { return pass_streams_[other]; }
  // Device address of a word of the rank's fences; 0 when the GPU cannot write it.
  [[nodiscard]] CUdeviceptr fence_address(const A32& word) const;
  [[nodiscard]] GpuLane& lane(Direction direction) const {
    return *lanes_[direction == Direction::load ? 1 : 0];
  }
  // The rank's staging memory; the ring is null where it has none.
  [[nodiscard]] StagingRing* staging() const { return staging_.get(); }
  [[nodiscard]] CUdeviceptr staging_address() const { return staging_address_; }
  [[nodiscard]] TransferMethod method() const { return method_; }
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
  struct Range {
    std::size_t base = 0;
    std::uint64_t offset = 0;
    CUdeviceptr address = 0;
  };
  // The memory in another GPU's context.
  struct View {
    std::shared_ptr<Gpu> gpu;
    std::vector<CUdeviceptr> opened;  // IPC handles, to be closed
    std::vector<CUdeviceptr> ranges;
  };
  GpuMemory(std::shared_ptr<Gpu> gpu, Transfers& copier, Schedules schedules, const ImportOptions& options)
      : DeviceImport(copier, gpu->device().index, gpu->device().node),
        gpu_(std::move(gpu)),
        schedules_(std::move(schedules)),
        method_(options.method),
        pass_streams_(options.exchanging_gpus),
        views_(options.exchanging_gpus) {}
  Result<Range> open_allocation(const DeviceAllocation& allocation, const UniqueFd* fd);
  Outcome open_staging(const StagingOffer& offer, const UniqueFd& block, std::uint32_t blocks);
  Result<Base> open_ipc(const DeviceAllocation& allocation);
  Result<Base> open_descriptor(const DeviceAllocation& allocation, const UniqueFd& fd);
  Outcome open_streams(std::uint32_t streams);
  void register_fences(FenceBlock* fences);
  Result<CUdeviceptr> open_base_in(const Base& base, View& view) const;
  static void close(View& view);

  const std::shared_ptr<Gpu> gpu_;
  const Schedules schedules_;
  const TransferMethod method_;
  std::vector<Base> bases_;
  std::vector<Range> ranges_;  // in the geometry's order
  std::unique_ptr<StagingRing> staging_;
  CUdeviceptr staging_address_ = 0;
  FenceBlock* fences_ = nullptr;  // while registered
  CUdeviceptr fence_base_ = 0;
  std::array<std::unique_ptr<GpuLane>, 2> lanes_;  // by direction
  std::vector<CUstream> pass_streams_;             // by GPU
  // By GPU, null while not opened there. SYNC view: stored with release once it is complete, read with
  // acquire.
  std::vector<std::atomic<const View*>> views_;
  std::vector<std::unique_ptr<View>> owned_views_;
  std::shared_ptr<PeerAccess> peers_;  // knows this memory
};

}  // namespace hicache::daemon
