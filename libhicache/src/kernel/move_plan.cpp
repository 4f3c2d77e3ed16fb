#include "move_plan.hpp"

#include <algorithm>
#include <string>

#include "hicache/controller/move_indices.hpp"

namespace hicache {
namespace {

// Items are counted in 32 bits, with room for the last warp's.
constexpr std::uint64_t kMaxItems = 1u << 31;

bool alike(const PlannedTensor& a, const PlannedTensor& b) {
  return a.rows == b.rows && a.row_bytes == b.row_bytes && a.states == b.states;
}

}  // namespace

Result<std::vector<PlannedTensor>> plan_tensors(const NamespaceSpec& spec, const DeviceGeometry& geometry) {
  constexpr std::uint64_t kWord = 8;
  std::vector<PlannedTensor> order;
  for (std::size_t i = 0; i < geometry.tensors.size(); ++i) {
    const DeviceTensor& tensor = geometry.tensors[i];
    if (tensor.page_bytes % kWord != 0 || tensor.page_stride % kWord != 0 || tensor.offset % kWord != 0 ||
        shard_piece_offset(spec, tensor) % kWord != 0) {
      return Error{Status::invalid_argument,
                   "tensor " + std::to_string(i) + " is not aligned to 8 bytes, as io_backend kernel needs",
                   0};
    }
    const bool by_token =
        tensor.kind != TensorKind::side && tensor.page_bytes / spec.page_tokens % kWord == 0;
    const std::uint32_t rows = by_token ? spec.page_tokens : 1;
    order.push_back(PlannedTensor{i, rows, tensor.page_bytes / rows, announced_with(spec, tensor),
                                  holds_states(spec, tensor)});
  }
  std::stable_sort(order.begin(), order.end(),
                   [](const PlannedTensor& a, const PlannedTensor& b) { return a.layer < b.layer; });
  return order;
}

std::vector<PlannedLaunch> plan_launches(std::span<const PlannedTensor> tensors, std::uint32_t pages,
                                         std::uint32_t layers, std::uint32_t block_quota, bool by_layer) {
  std::vector<PlannedLaunch> launches;
  for (std::uint32_t first = 0; first < tensors.size();) {
    const PlannedTensor& one = tensors[first];
    const std::uint64_t items_each = std::uint64_t{pages} * one.rows;
    const std::uint64_t most = std::max<std::uint64_t>(1, kMaxItems / items_each);
    std::uint32_t end = first + 1;
    while (end < tensors.size() && end - first < most && alike(tensors[end], one) &&
           (!by_layer || tensors[end].layer == one.layer)) {
      ++end;
    }
    PlannedLaunch launch;
    launch.first = first;
    launch.count = end - first;
    launch.items = static_cast<std::uint32_t>(items_each * launch.count);
    const KernelLaunch shape = *kernel_launch(launch.items, block_quota, kMoveWarps);
    launch.items_per_warp = shape.items_per_warp;
    launch.blocks = shape.blocks;
    launch.layers_done = end < tensors.size() ? tensors[end].layer : layers;
    launches.push_back(launch);
    first = end;
  }
  return launches;
}

}  // namespace hicache
