// The made-up model of the benchmarks: a namespace whose pages have the wanted number of bytes, and device
// buffers for it.
#pragma once

#include <cstdint>
#include <string>

#include "libhicache/include/hicache/client.hpp"
#include "shm/device_geometry.hpp"
#include "shm/namespace_spec.hpp"
#include "shm/status.hpp"

namespace hicache::bench {

constexpr std::uint32_t kPageTokens = 512;  // a block of the traces
constexpr std::uint64_t kDefaultPageBytes = 128 * kKiB;
constexpr std::uint64_t kSmallPageBytes = 16 * kKiB;

// A namespace with pages of `page_bytes` bytes a shard, in up to four layers. invalid_argument when the bytes
// can't be divided so.
Result<NamespaceSpec> make_spec(Attention attention, std::uint32_t tp_size, std::uint64_t page_bytes,
                                std::uint32_t page_tokens = kPageTokens);

// Geometry of `pages` device pages: one tensor per layer and kind, one after the other in one allocation.
DeviceGeometry make_geometry(const NamespaceSpec& spec, std::uint32_t pages);

// A rank's device memory with that geometry.
class DeviceMemory {
 public:
  static Result<DeviceMemory> create(const NamespaceSpec& spec, std::uint32_t pages);
  Outcome register_with(Session& session) const;

  [[nodiscard]] const DeviceGeometry& geometry() const { return geometry_; }
  [[nodiscard]] std::span<std::uint8_t> piece(const DeviceTensor& tensor, DevicePage page) const {
    return {buffer_.data() + tensor.offset + page.value * tensor.page_stride, tensor.page_bytes};
  }

 private:
  DeviceMemory(HostDeviceBuffer buffer, DeviceGeometry geometry)
      : buffer_(std::move(buffer)), geometry_(std::move(geometry)) {}

  HostDeviceBuffer buffer_;
  DeviceGeometry geometry_;
};

}  // namespace hicache::bench
