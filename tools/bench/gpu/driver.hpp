// The functions of the CUDA driver that the benchmark calls, looked up in libcuda.so.1 at run time.
#pragma once

#include <cuda.h>

#include <string>

#include "shm/status.hpp"

namespace hicache::bench {

// cuda.h renames some functions to their current version: the list is expanded before a name becomes a member
// or text.
#define HICACHE_BENCH_CUDA_FUNCTIONS(X) \
  X(cuInit)                             \
  X(cuGetErrorName)                     \
  X(cuDriverGetVersion)                 \
  X(cuDeviceGetCount)                   \
  X(cuDeviceGet)                        \
  X(cuDeviceGetName)                    \
  X(cuDevicePrimaryCtxRetain)           \
  X(cuDevicePrimaryCtxRelease)          \
  X(cuCtxSetCurrent)                    \
  X(cuMemGetInfo)                       \
  X(cuMemAlloc)                         \
  X(cuMemFree)                          \
  X(cuMemAllocAsync)                    \
  X(cuMemAllocManaged)                  \
  X(cuMemCreate)                        \
  X(cuMemRelease)                       \
  X(cuMemAddressReserve)                \
  X(cuMemAddressFree)                   \
  X(cuMemMap)                           \
  X(cuMemUnmap)                         \
  X(cuMemSetAccess)                     \
  X(cuMemGetAllocationGranularity)      \
  X(cuMemHostAlloc)                     \
  X(cuMemFreeHost)                      \
  X(cuMemcpyHtoD)                       \
  X(cuMemcpyDtoH)                       \
  X(cuMemcpyHtoDAsync)                  \
  X(cuMemcpyDtoHAsync)                  \
  X(cuMemsetD8)                         \
  X(cuStreamCreate)                     \
  X(cuStreamDestroy)                    \
  X(cuStreamSynchronize)                \
  X(cuStreamQuery)                      \
  X(cuEventCreate)                      \
  X(cuEventDestroy)                     \
  X(cuEventRecord)                      \
  X(cuEventSynchronize)                 \
  X(cuEventElapsedTime)                 \
  X(cuModuleLoadData)                   \
  X(cuModuleGetFunction)                \
  X(cuLaunchKernel)

struct Driver {
// NOLINTNEXTLINE(bugprone-macro-parentheses): a member's name cannot stand in parentheses
#define HICACHE_CUDA_MEMBER(name) decltype(&::name) name = nullptr;
  HICACHE_BENCH_CUDA_FUNCTIONS(HICACHE_CUDA_MEMBER)
#undef HICACHE_CUDA_MEMBER
};

// The loaded driver, initialised in this process, or why there is none. A process that forks ranks calls it
// in the ranks only: CUDA does not survive a fork.
Result<const Driver*> load_driver();

// ok, or `what` with the driver's name of the error.
Outcome check(const Driver& driver, CUresult result, const char* what);

}  // namespace hicache::bench
