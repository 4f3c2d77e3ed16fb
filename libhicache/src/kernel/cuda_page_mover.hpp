// Moves pages of GPU memory with kernels of the rank's own, on the pool that is registered with its context.
#pragma once

#include <memory>
#include <span>

#include "page_mover.hpp"
#include "shm/channel_layout.hpp"
#include "shm/device_geometry.hpp"
#include "shm/shared_memory.hpp"

namespace hicache {

struct CudaRange;

// `ranges` are the geometry's allocations in this process. `pool` and `fences` outlive the mover. not_found
// when CUDA is off, with the reason; invalid_argument for tensors that are not aligned to 8 bytes.
HICACHE_LOCAL Result<std::unique_ptr<PageMover>> make_cuda_page_mover(const NamespaceSpec& spec,
                                                                      const DeviceGeometry& geometry,
                                                                      std::span<const CudaRange> ranges,
                                                                      const Mapping& pool, FenceBlock& fences,
                                                                      const PoolGuard& guard);

}  // namespace hicache
