// The functions of the CUDA driver that the daemon calls, looked up in libcuda.so.1 at run time: the daemon
// does not link to CUDA and runs on machines without it.
#pragma once

#include <cuda.h>

#include <string>

#include "shm/status.hpp"

namespace hicache::daemon {

// cuda.h renames some functions to their current version; the list is expanded before a name becomes a member
// or text, so that members and symbols carry the same version.
#define HICACHE_DAEMON_CUDA_FUNCTIONS(X)    \
  X(cuInit)                                 \
  X(cuGetErrorName)                         \
  X(cuGetErrorString)                       \
  X(cuDriverGetVersion)                     \
  X(cuDeviceGetCount)                       \
  X(cuDeviceGet)                            \
  X(cuDeviceGetName)                        \
  X(cuDeviceGetUuid)                        \
  X(cuDeviceGetPCIBusId)                    \
  X(cuDeviceCanAccessPeer)                  \
  X(cuDevicePrimaryCtxRetain)               \
  X(cuDevicePrimaryCtxRelease)              \
  X(cuCtxSetCurrent)                        \
  X(cuStreamCreate)                         \
  X(cuStreamDestroy)                        \
  X(cuStreamWriteValue32)                   \
  X(cuStreamWaitEvent)                      \
  X(cuEventCreate)                          \
  X(cuEventDestroy)                         \
  X(cuEventRecord)                          \
  X(cuEventQuery)                           \
  X(cuMemcpyHtoDAsync)                      \
  X(cuMemcpyDtoHAsync)                      \
  X(cuMemcpyDtoDAsync)                      \
  X(cuMemcpy2DAsync)                        \
  X(cuMemHostRegister)                      \
  X(cuMemHostUnregister)                    \
  X(cuMemHostGetDevicePointer)              \
  X(cuMemGetAddressRange)                   \
  X(cuIpcOpenMemHandle)                     \
  X(cuIpcCloseMemHandle)                    \
  X(cuMemImportFromShareableHandle)         \
  X(cuMemGetAllocationPropertiesFromHandle) \
  X(cuMemAddressReserve)                    \
  X(cuMemAddressFree)                       \
  X(cuMemMap)                               \
  X(cuMemUnmap)                             \
  X(cuMemSetAccess)                         \
  X(cuMemRelease)

// Null where the driver lacks them.
#if CUDA_VERSION >= 13000
#define HICACHE_DAEMON_CUDA_OPTIONAL(X) X(cuMemcpyBatchAsync)
#else
#define HICACHE_DAEMON_CUDA_OPTIONAL(X)
#endif

struct CudaDriver {
// NOLINTNEXTLINE(bugprone-macro-parentheses): a member's name cannot stand in parentheses
#define HICACHE_CUDA_MEMBER(name) decltype(&::name) name = nullptr;
  HICACHE_DAEMON_CUDA_FUNCTIONS(HICACHE_CUDA_MEMBER)
  HICACHE_DAEMON_CUDA_OPTIONAL(HICACHE_CUDA_MEMBER)
#undef HICACHE_CUDA_MEMBER
};

// The loaded and initialised driver, or why there is none. The first call loads it. Thread-safe.
Result<const CudaDriver*> cuda_driver();

// "what: CUDA_ERROR_X (text)".
Error cuda_error(const CudaDriver& driver, CUresult result, const std::string& what,
                 Status status = Status::system_error);

}  // namespace hicache::daemon
