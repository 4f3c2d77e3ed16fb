// Where a rank's KV data lies in its device buffers: allocations, and one tensor per layer and kind inside
// them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "shm/namespace_spec.hpp"
#include "shm/status.hpp"
#include "shm/types.hpp"
#include "shm/wire.hpp"

namespace hicache {

enum class TensorKind : std::uint32_t { k = 0, v = 1, latent = 2, side = 3 };
enum class DeviceKind : std::uint32_t { host = 1, cuda = 2 };

// How a CUDA allocation travels to the daemon.
enum class CudaExport : std::uint32_t {
  ipc_handle = 1,  // legacy CUDA IPC: cuMemAlloc, cudaMalloc
  posix_fd = 2,    // cuMemCreate memory, exported as a POSIX file descriptor that goes beside the message
};

// One exported range of memory that tensors lie in. Host memory is a sealed memfd beside the message; CUDA
// memory is a part of an allocation of the driver's, named by the GPU's UUID and never by a device index,
// because ranks may each see their GPU as device 0.
struct DeviceAllocation {
  DeviceKind kind = DeviceKind::host;
  std::uint64_t bytes = 0;  // of the registered range; tensors' offsets count from its start

  // For cuda only; zero and never sent for host.
  std::array<std::uint8_t, 16> gpu_uuid{};
  CudaExport export_kind = CudaExport::ipc_handle;
  std::array<std::uint8_t, 64> ipc_handle{};  // of the driver's allocation; zero for posix_fd
  std::uint64_t base_bytes = 0;               // size of the driver's allocation
  std::uint64_t base_offset = 0;              // where the registered range begins in it

  // Whether a descriptor beside the message belongs to this allocation. They come in the allocations' order.
  [[nodiscard]] bool has_descriptor() const {
    return kind == DeviceKind::host || export_kind == CudaExport::posix_fd;
  }
};

// Page p of the tensor lies at offset + p * page_stride in its allocation and has page_bytes bytes. In a
// tensor of a trailing pool it is state slot p.
struct DeviceTensor {
  std::uint32_t allocation = 0;
  std::uint32_t layer = 0;  // 0-based within this pipeline stage, or within the side pool
  TensorKind kind = TensorKind::k;
  std::uint64_t offset = 0;
  std::uint64_t page_stride = 0;
  std::uint64_t page_bytes = 0;
  std::uint32_t pool = 0;  // side: index in the namespace's side_pools; else 0
};

struct DeviceGeometry {
  std::vector<DeviceAllocation> allocations;
  std::vector<DeviceTensor> tensors;
  std::uint32_t pages = 0;   // device pages in every tensor but those of trailing pools
  std::uint32_t states = 0;  // state slots in every tensor of the trailing pools; 0 when there are none

  // Checks the geometry against the namespace and every tensor against its allocation's size: each (layer,
  // kind) of the namespace and of its side pools exactly once, nothing outside, no overflow. Names the first
  // tensor and field that is wrong. All allocations are of one kind, CUDA ones on one GPU.
  [[nodiscard]] Outcome validate(const NamespaceSpec& spec) const;

  // Descriptors that travel beside the message.
  [[nodiscard]] std::size_t descriptors() const;
  // Kind of the allocations. Precondition: there is one.
  [[nodiscard]] DeviceKind device_kind() const { return allocations.front().kind; }

  void encode(WireWriter& out) const;
  static DeviceGeometry decode(WireReader& in);
};

// True for tensors whose pages are state slots.
inline bool holds_states(const NamespaceSpec& spec, const DeviceTensor& tensor) {
  return tensor.kind == TensorKind::side && spec.side_pools[tensor.pool].rule == HitRule::trailing_pages;
}

// The layer with which a tensor is announced. A side pool with as many layers as there are KV layers goes
// layer by layer with them; any other is complete before the first layer is.
inline std::uint32_t announced_with(const NamespaceSpec& spec, const DeviceTensor& tensor) {
  const bool alike = tensor.kind != TensorKind::side || spec.side_pools[tensor.pool].layers == spec.layers;
  return alike ? tensor.layer : 0;
}

// Offset of a tensor's piece inside a shard of a host page: kinds one after the other, layers inside (the
// order of page_first_direct, so that a shard's KV bytes equal SGLang's flat page), then the side pools.
inline std::uint64_t shard_piece_offset(const NamespaceSpec& spec, std::uint32_t layer, TensorKind kind) {
  const std::uint64_t half = kind == TensorKind::v ? spec.layers : 0;
  return (half + layer) * spec.piece_bytes();
}
inline std::uint64_t shard_piece_offset(const NamespaceSpec& spec, const DeviceTensor& tensor) {
  if (tensor.kind != TensorKind::side) return shard_piece_offset(spec, tensor.layer, tensor.kind);
  return spec.side_pool_offset(tensor.pool) + tensor.layer * spec.side_pools[tensor.pool].piece_bytes;
}

}  // namespace hicache
