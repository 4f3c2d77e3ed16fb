// GPU memory of a rank: how CUDA allocations are described so that the daemon can open them.
//
// The driver is loaded at run time (libcuda.so.1): nothing here needs CUDA to be linked, and where it is
// missing every function says why. Streams are CUstream (or cudaStream_t, the same thing) passed as void*, so
// that this header needs no CUDA header. Session::stream_wait_layer and Session::stream_raise_write_fence in
// client.hpp put fences into streams.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "hicache/client.hpp"
#include "hicache/export.h"
#include "shm/device_geometry.hpp"
#include "shm/fd.hpp"
#include "shm/status.hpp"

namespace hicache {

// Device memory that tensors lie in. May begin anywhere inside an allocation and must end inside it.
struct CudaRange {
  const void* pointer = nullptr;
  std::uint64_t bytes = 0;
};

// A range as it goes to the daemon. `fd` is valid for memory that travels as a descriptor (cuMemCreate) and
// may be closed once register_buffers has returned.
struct CudaAllocation {
  DeviceAllocation allocation;
  UniqueFd fd;
};

// not_permitted with the reason for memory that no other process can open: cudaMallocAsync (memory pools),
// managed or host memory, cuMemCreate memory without an exportable handle. invalid_argument when the pointer
// is no device memory or the range leaves its allocation; not_found when CUDA is off (no driver, or built
// without). Needs no current context. Thread-safe.
HICACHE_EXPORT Result<CudaAllocation> describe_cuda_allocation(const CudaRange& range);

// describe_cuda_allocation for every range, then Session::register_buffers. Tensors name ranges by index,
// their offsets count from the range's start. `states`: see DeviceGeometry. Blocks at most timeout_ms.
HICACHE_EXPORT Outcome register_cuda_buffers(Session& session, std::span<const CudaRange> ranges,
                                             std::span<const DeviceTensor> tensors, std::uint32_t pages,
                                             std::uint32_t timeout_ms = 10'000, std::uint32_t states = 0);

}  // namespace hicache
