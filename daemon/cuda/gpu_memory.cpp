#include "daemon/cuda/gpu_memory.hpp"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "daemon/cuda/peer_access.hpp"

namespace hicache::daemon {
namespace {

constexpr std::uint64_t kFenceBytes = align_up(sizeof(FenceBlock), 4096);  // registration works on host pages

// What the driver maps opened memory with, where its size allows it.
constexpr std::uint64_t kGpuPageBytes = 2 * kMiB;

Error refused(const std::string& what, Error error) {
  error.message = what + ": " + error.message;
  return error;
}

}  // namespace

Result<std::unique_ptr<GpuMemory>> GpuMemory::import(std::shared_ptr<Gpu> gpu, Transfers& copier,
                                                     const NamespaceSpec& spec,
                                                     const DeviceGeometry& geometry,
                                                     const std::optional<StagingOffer>& staging,
                                                     std::span<const UniqueFd> fds, FenceBlock* fences,
                                                     const ImportOptions& options) {
  if (auto used = gpu->use(); !used) return used.error();
  Schedules schedules(spec, geometry, options.method, staging ? staging->slot_bytes : 0);
  std::unique_ptr<GpuMemory> memory(new GpuMemory(std::move(gpu), copier, std::move(schedules), options));
  std::size_t next_fd = 0;
  for (std::size_t i = 0; i < geometry.allocations.size(); ++i) {
    const DeviceAllocation& allocation = geometry.allocations[i];
    const UniqueFd* fd = allocation.has_descriptor() ? &fds[next_fd++] : nullptr;
    const auto opened = memory->open_allocation(allocation, fd);
    if (!opened) return refused("allocation " + std::to_string(i), opened.error());
    memory->ranges_.push_back(*opened);
  }
  if (staging) {
    if (auto opened = memory->open_staging(*staging, fds[next_fd], options.staging_blocks); !opened)
      return refused("staging memory", opened.error());
  }
  if (auto opened = memory->open_streams(options.streams); !opened) return opened.error();
  if (options.exchanging_gpus == 0) memory->register_fences(fences);
  return memory;
}

void GpuMemory::introduce_to(const std::shared_ptr<PeerAccess>& peers, const PrefixHash& namespace_digest) {
  peers_ = peers;
  peers_->introduce(*this, gpu_, namespace_digest);
}

Outcome GpuMemory::open_staging(const StagingOffer& offer, const UniqueFd& block, std::uint32_t blocks) {
  auto ring = StagingRing::map(block.get(), offer.slot_bytes, blocks);
  if (!ring) return ring.error();
  DeviceAllocation allocation;
  allocation.kind = DeviceKind::cuda;
  allocation.ipc_handle = offer.ipc_handle;
  allocation.base_bytes = offer.base_bytes;
  allocation.base_offset = offer.base_offset;
  allocation.bytes = kStagingSlots * offer.slot_bytes;
  const auto opened = open_allocation(allocation, nullptr);
  if (!opened) return opened.error();
  staging_address_ = opened->address;
  staging_ = std::make_unique<StagingRing>(std::move(*ring));
  return success();
}

GpuMemory::~GpuMemory() {
  if (peers_ != nullptr) peers_->forget(*this);
  for (const auto& view : owned_views_) close(*view);
  if (auto used = gpu_->use(); !used) return;
  const CudaDriver& driver = gpu_->driver();
  for (const auto& lane : lanes_) {
    if (lane == nullptr) continue;
    for (const CUstream stream : lane->streams) driver.cuStreamDestroy(stream);
  }
  for (const CUstream stream : pass_streams_) {
    if (stream != nullptr) driver.cuStreamDestroy(stream);
  }
  if (fence_base_ != 0) driver.cuMemHostUnregister(fences_);
  for (const Base& base : bases_) {
    if (base.ipc) {
      driver.cuIpcCloseMemHandle(base.address);
    } else {
      driver.cuMemUnmap(base.address, base.bytes);
      driver.cuMemAddressFree(base.address, base.bytes);
    }
  }
}

Result<GpuMemory::Range> GpuMemory::open_allocation(const DeviceAllocation& allocation, const UniqueFd* fd) {
  // Ranges of one allocation of the driver's share it: a handle is opened once.
  auto base = bases_.end();
  if (fd == nullptr) {
    base = std::find_if(bases_.begin(), bases_.end(),
                        [&](const Base& b) { return b.ipc && b.handle == allocation.ipc_handle; });
  }
  if (base == bases_.end()) {
    auto opened = fd == nullptr ? open_ipc(allocation) : open_descriptor(allocation, *fd);
    if (!opened) return opened.error();
    if (opened->bytes % kGpuPageBytes != 0) {
      spdlog::warn(
          "GPU allocation of {} bytes: not a multiple of 2 MiB, so it is mapped with small GPU pages and "
          "copies of short rows are slow",
          opened->bytes);
    }
    bases_.push_back(*opened);
    base = bases_.end() - 1;
  }
  if (allocation.bytes > base->bytes || allocation.base_offset > base->bytes - allocation.bytes) {
    return Error{Status::invalid_argument,
                 "the range ends at byte " + std::to_string(allocation.base_offset) + " + " +
                     std::to_string(allocation.bytes) + " of its base, the driver says that the base has " +
                     std::to_string(base->bytes),
                 0};
  }
  return Range{static_cast<std::size_t>(base - bases_.begin()), allocation.base_offset,
               base->address + allocation.base_offset};
}

Result<GpuMemory::Base> GpuMemory::open_ipc(const DeviceAllocation& allocation) {
  const CudaDriver& driver = gpu_->driver();
  CUipcMemHandle handle;
  static_assert(sizeof handle == sizeof allocation.ipc_handle);
  std::memcpy(&handle, allocation.ipc_handle.data(), sizeof handle);
  Base base;
  base.ipc = true;
  base.handle = allocation.ipc_handle;
  CUresult r = driver.cuIpcOpenMemHandle(&base.address, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
  if (r != CUDA_SUCCESS)
    return cuda_error(driver, r, "the ipc handle cannot be opened", Status::invalid_argument);
  CUdeviceptr begin = 0;
  std::size_t bytes = 0;
  r = driver.cuMemGetAddressRange(&begin, &bytes, base.address);
  if (r != CUDA_SUCCESS || begin != base.address) {
    driver.cuIpcCloseMemHandle(base.address);
    if (r != CUDA_SUCCESS) return cuda_error(driver, r, "the size of the opened allocation is unknown");
    return Error{Status::invalid_argument, "the ipc handle is not that of a whole allocation", 0};
  }
  base.bytes = bytes;
  return base;
}

Result<GpuMemory::Base> GpuMemory::open_descriptor(const DeviceAllocation& allocation, const UniqueFd& fd) {
  const CudaDriver& driver = gpu_->driver();
  const CUdevice device = gpu_->device().device;
  const auto fail = [&](CUresult r, const char* what) {
    return cuda_error(driver, r, what, Status::invalid_argument);
  };
  CUmemGenericAllocationHandle handle = 0;
  CUresult r = driver.cuMemImportFromShareableHandle(
      &handle, reinterpret_cast<void*>(static_cast<std::uintptr_t>(fd.get())),
      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  if (r != CUDA_SUCCESS) return fail(r, "the descriptor cannot be imported");
  CUmemAllocationProp properties{};
  r = driver.cuMemGetAllocationPropertiesFromHandle(&properties, handle);
  if (r == CUDA_SUCCESS &&
      (properties.location.type != CU_MEM_LOCATION_TYPE_DEVICE || properties.location.id != device)) {
    driver.cuMemRelease(handle);
    return Error{Status::invalid_argument,
                 "the descriptor's memory is not on " + uuid_text(gpu_->device().uuid), 0};
  }
  Base base;
  base.bytes = allocation.base_bytes;
  if (r == CUDA_SUCCESS) r = driver.cuMemAddressReserve(&base.address, base.bytes, 0, 0, 0);
  if (r != CUDA_SUCCESS) {
    driver.cuMemRelease(handle);
    return fail(r, "no address range for the descriptor's memory");
  }
  r = driver.cuMemMap(base.address, base.bytes, 0, handle, 0);
  driver.cuMemRelease(handle);  // the mapping keeps the memory
  if (r == CUDA_SUCCESS) {
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    r = driver.cuMemSetAccess(base.address, base.bytes, &access, 1);
    if (r != CUDA_SUCCESS) driver.cuMemUnmap(base.address, base.bytes);
  }
  if (r != CUDA_SUCCESS) {
    driver.cuMemAddressFree(base.address, base.bytes);
    return fail(r, "the descriptor's memory cannot be mapped");
  }
  return base;
}

Outcome GpuMemory::open_streams(std::uint32_t streams) {
  const CudaDriver& driver = gpu_->driver();
  for (auto& lane : lanes_) {
    lane = std::make_unique<GpuLane>();
    lane->direct_streams = streams;
    lane->staged_streams = &lane == &lanes_[0] ? GpuLane::kStagedWriteStreams : GpuLane::kStagedLoadStreams;
    for (std::size_t i = 0; i < std::max(lane->direct_streams, lane->staged_streams); ++i) {
      CUstream stream = nullptr;
      if (const CUresult r = driver.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING); r != CUDA_SUCCESS) {
        return cuda_error(driver, r, "no stream for the rank");
      }
      lane->streams.push_back(stream);
    }
  }
  for (CUstream& stream : pass_streams_) {
    if (const CUresult r = driver.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING); r != CUDA_SUCCESS) {
      return cuda_error(driver, r, "no stream from GPU to GPU for the rank");
    }
  }
  return success();
}

Result<CUdeviceptr> GpuMemory::open_base_in(const Base& base, View& view) const {
  const CudaDriver& driver = gpu_->driver();
  if (!base.ipc) {
    // A mapping belongs to the process: the other GPU only needs access to it.
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = view.gpu->device().device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (const CUresult r = driver.cuMemSetAccess(base.address, base.bytes, &access, 1); r != CUDA_SUCCESS)
      return cuda_error(driver, r, "no access for the other GPU");
    return base.address;
  }
  CUipcMemHandle handle;
  std::memcpy(&handle, base.handle.data(), sizeof handle);
  CUdeviceptr address = 0;
  if (const CUresult r = driver.cuIpcOpenMemHandle(&address, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
      r != CUDA_SUCCESS)
    return cuda_error(driver, r, "the ipc handle cannot be opened");
  view.opened.push_back(address);
  return address;
}

Outcome GpuMemory::open_in(const std::shared_ptr<Gpu>& other) {
  const std::uint32_t index = other->device().index;
  if (index >= views_.size() || reachable_from(index)) return success();
  if (!other->can_reach(*gpu_)) return Error{Status::not_permitted, "no peer access", 0};
  if (auto used = other->use(); !used) return used.error();
  auto view = std::make_unique<View>();
  view->gpu = other;
  std::vector<CUdeviceptr> bases;
  for (const Base& base : bases_) {
    const auto address = open_base_in(base, *view);
    if (!address) {
      close(*view);
      return address.error();
    }
    bases.push_back(*address);
  }
  for (const Range& range : ranges_) view->ranges.push_back(bases[range.base] + range.offset);
  views_[index].store(view.get(), std::memory_order_release);  // SYNC view
  owned_views_.push_back(std::move(view));
  return success();
}

void GpuMemory::close(View& view) {
  if (view.opened.empty() || !view.gpu->use()) return;
  for (const CUdeviceptr address : view.opened) view.gpu->driver().cuIpcCloseMemHandle(address);
}

void GpuMemory::register_fences(FenceBlock* fences) {
  const CudaDriver& driver = gpu_->driver();
  const unsigned flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
  CUresult r = driver.cuMemHostRegister(fences, kFenceBytes, flags);
  if (r == CUDA_SUCCESS) {
    fences_ = fences;
    r = driver.cuMemHostGetDevicePointer(&fence_base_, fences, 0);
    if (r != CUDA_SUCCESS) driver.cuMemHostUnregister(fences);
  }
  if (r == CUDA_SUCCESS) return;
  fence_base_ = 0;
  spdlog::warn("{}; layers are announced by the CPU",
               cuda_error(driver, r, "the rank's fence words cannot be mapped for the GPU").message);
}

CUdeviceptr GpuMemory::fence_address(const A32& word) const {
  if (fence_base_ == 0) return 0;
  const auto offset =
      reinterpret_cast<const std::uint8_t*>(&word) - reinterpret_cast<const std::uint8_t*>(fences_);
  return fence_base_ + static_cast<CUdeviceptr>(offset);
}

}  // namespace hicache::daemon
