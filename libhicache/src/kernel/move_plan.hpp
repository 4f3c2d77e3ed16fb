// How a request becomes launches of the kernels that gather and scatter pages. Pure code.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "hicache/export.h"
#include "kernel_requests.hpp"
#include "page_kernel_arguments.hpp"
#include "shm/device_geometry.hpp"
#include "shm/status.hpp"

namespace hicache {

// A tensor as the plan sees it, in the order in which layers are announced.
struct PlannedTensor {
  std::size_t tensor = 0;  // in the geometry
  std::uint32_t rows = 1;  // of its part of a page: tokens, where they can be told apart
  std::uint64_t row_bytes = 0;
  std::uint32_t layer = 0;  // with which it is announced
  bool states = false;
};

// One launch: tensors [first, first + count) of the plan's order, every page.
struct PlannedLaunch {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
  std::uint32_t items = 0;  // rows of all pages and tensors: one warp moves one at a time
  std::uint32_t items_per_warp = 0;
  std::uint32_t blocks = 0;
  // After it every tensor of the layers below this one has been moved.
  std::uint32_t layers_done = 0;
};

// The order in which tensors are moved. invalid_argument, naming the tensor, where pieces are not made of
// words of 8 bytes that lie on such words.
HICACHE_LOCAL Result<std::vector<PlannedTensor>> plan_tensors(const NamespaceSpec& spec,
                                                              const DeviceGeometry& geometry);

// The launches of a request of `pages` pages. `by_layer`: each layer's tensors are moved before the next
// one's begin, so that they can be announced one by one. No launch has more than block_quota blocks.
HICACHE_LOCAL std::vector<PlannedLaunch> plan_launches(std::span<const PlannedTensor> tensors,
                                                       std::uint32_t pages, std::uint32_t layers,
                                                       std::uint32_t block_quota, bool by_layer);

}  // namespace hicache
