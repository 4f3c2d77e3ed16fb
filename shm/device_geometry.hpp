// Where a rank's KV data lies in its device buffers: allocations, and one tensor per layer and kind inside
// them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shm/namespace_spec.hpp"
#include "shm/status.hpp"
#include "shm/types.hpp"
#include "shm/wire.hpp"

namespace hicache {

enum class TensorKind : std::uint32_t { k = 0, v = 1, latent = 2 };
enum class DeviceKind : std::uint32_t { host = 1, cuda = 2 };

// One exported allocation. For the host backend it travels as a sealed memfd beside the message; CUDA handles
// and GPU ids come with the CUDA path.
struct DeviceAllocation {
  DeviceKind kind = DeviceKind::host;
  std::uint64_t bytes = 0;
};

// Page p of the tensor lies at offset + p * page_stride in its allocation and has page_bytes bytes.
struct DeviceTensor {
  std::uint32_t allocation = 0;
  std::uint32_t layer = 0;  // 0-based within this pipeline stage
  TensorKind kind = TensorKind::k;
  std::uint64_t offset = 0;
  std::uint64_t page_stride = 0;
  std::uint64_t page_bytes = 0;
};

struct DeviceGeometry {
  std::vector<DeviceAllocation> allocations;
  std::vector<DeviceTensor> tensors;
  std::uint32_t pages = 0;  // device pages in every tensor

  // Checks the geometry against the namespace and every tensor against its allocation's size: each (layer,
  // kind) of the namespace exactly once, nothing outside, no overflow. Names the first tensor and field that
  // is wrong.
  [[nodiscard]] Outcome validate(const NamespaceSpec& spec) const;

  void encode(WireWriter& out) const;
  static DeviceGeometry decode(WireReader& in);
};

// Offset of a tensor's piece inside a shard of a host page: kinds one after the other, layers inside (the
// order of page_first_direct, so that a shard's bytes equal SGLang's flat page).
inline std::uint64_t shard_piece_offset(const NamespaceSpec& spec, std::uint32_t layer, TensorKind kind) {
  const std::uint64_t half = kind == TensorKind::v ? spec.layers : 0;
  return (half + layer) * spec.piece_bytes();
}

}  // namespace hicache
