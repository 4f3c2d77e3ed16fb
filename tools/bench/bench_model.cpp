#include "tools/bench/bench_model.hpp"

#include <fmt/format.h>

#include <array>
#include <limits>

namespace hicache::bench {

Result<NamespaceSpec> make_spec(Attention attention, std::uint32_t tp_size, std::uint64_t page_bytes,
                                std::uint32_t page_tokens) {
  NamespaceSpec spec;
  spec.model = attention == Attention::mha ? "hicache-bench-mha" : "hicache-bench-mla";
  spec.attention = attention;
  spec.page_tokens = page_tokens;
  spec.heads_per_shard = 1;
  spec.tp_size = tp_size;
  for (const std::uint32_t layers : {4u, 2u, 1u}) {
    for (const std::uint32_t element : {2u, 1u}) {
      const std::uint64_t unit = std::uint64_t{layers} * spec.kinds() * page_tokens * element;
      if (page_bytes == 0 || page_bytes % unit != 0) continue;
      if (page_bytes / unit > std::numeric_limits<std::uint32_t>::max()) continue;
      spec.layers = layers;
      spec.element_bytes = element;
      spec.dtype = element == 2 ? "bfloat16" : "fp8_e4m3";
      spec.head_dim = static_cast<std::uint32_t>(page_bytes / unit);
      if (const Outcome valid = spec.validate(); !valid) return valid.error();
      return spec;
    }
  }
  return Error{Status::invalid_argument,
               fmt::format("page bytes {}: expected a multiple of {} for pages of {} tokens", page_bytes,
                           std::uint64_t{spec.kinds()} * page_tokens, page_tokens),
               0};
}

DeviceGeometry make_geometry(const NamespaceSpec& spec, std::uint32_t pages) {
  DeviceGeometry geometry;
  geometry.pages = pages;
  const std::uint64_t tensor_bytes = spec.piece_bytes() * pages;
  std::uint64_t offset = 0;
  const std::array<TensorKind, 2> mha{TensorKind::k, TensorKind::v};
  for (std::uint32_t layer = 0; layer < spec.layers; ++layer) {
    for (std::uint32_t kind = 0; kind < spec.kinds(); ++kind) {
      DeviceTensor tensor;
      tensor.layer = layer;
      tensor.kind = spec.attention == Attention::mha ? mha[kind] : TensorKind::latent;
      tensor.offset = offset;
      tensor.page_stride = spec.piece_bytes();
      tensor.page_bytes = spec.piece_bytes();
      geometry.tensors.push_back(tensor);
      offset += tensor_bytes;
    }
  }
  geometry.allocations.push_back({DeviceKind::host, offset});
  return geometry;
}

Result<DeviceMemory> DeviceMemory::create(const NamespaceSpec& spec, std::uint32_t pages) {
  DeviceGeometry geometry = make_geometry(spec, pages);
  auto buffer = HostDeviceBuffer::create(geometry.allocations.front().bytes);
  if (!buffer) return buffer.error();
  return DeviceMemory(std::move(*buffer), std::move(geometry));
}

Outcome DeviceMemory::register_with(Session& session) const {
  const std::array<int, 1> fds{buffer_.fd()};
  return session.register_buffers(geometry_, fds);
}

}  // namespace hicache::bench
