// The functions of the CUDA driver that libhicache calls, looked up in libcuda.so.1 at run time.
#pragma once

#include <cuda.h>

#include <string>

#include "hicache/export.h"
#include "shm/status.hpp"

namespace hicache {

// cuda.h renames some functions to their current version (cuMemGetAddressRange_v2): the list is expanded
// before a name becomes a member or text, so that members and symbols carry the same version.
#define HICACHE_CLIENT_CUDA_FUNCTIONS(X) \
  X(cuInit)                              \
  X(cuGetErrorName)                      \
  X(cuGetErrorString)                    \
  X(cuDeviceGet)                         \
  X(cuDeviceGetUuid)                     \
  X(cuDevicePrimaryCtxRetain)            \
  X(cuDevicePrimaryCtxRelease)           \
  X(cuCtxGetCurrent)                     \
  X(cuCtxPushCurrent)                    \
  X(cuCtxPopCurrent)                     \
  X(cuPointerGetAttribute)               \
  X(cuIpcGetMemHandle)                   \
  X(cuMemRetainAllocationHandle)         \
  X(cuMemExportToShareableHandle)        \
  X(cuMemRelease)                        \
  X(cuMemHostRegister)                   \
  X(cuMemHostUnregister)                 \
  X(cuMemHostGetDevicePointer)           \
  X(cuStreamGetCtx)                      \
  X(cuStreamWaitValue32)                 \
  X(cuStreamWriteValue32)                \
  X(cuCtxGetStreamPriorityRange)         \
  X(cuStreamCreateWithPriority)          \
  X(cuStreamDestroy)                     \
  X(cuStreamSynchronize)                 \
  X(cuModuleLoadData)                    \
  X(cuModuleUnload)                      \
  X(cuModuleGetFunction)                 \
  X(cuLaunchKernel)                      \
  X(cuMemAlloc)                          \
  X(cuMemFree)                           \
  X(cuMemcpyHtoDAsync)

struct CudaDriver {
// NOLINTNEXTLINE(bugprone-macro-parentheses): a member's name cannot stand in parentheses
#define HICACHE_CUDA_MEMBER(name) decltype(&::name) name = nullptr;
  HICACHE_CLIENT_CUDA_FUNCTIONS(HICACHE_CUDA_MEMBER)
#undef HICACHE_CUDA_MEMBER
};

// The loaded and initialised driver, or why there is none. The first call loads it. Thread-safe.
HICACHE_LOCAL Result<const CudaDriver*> cuda_driver();

// "what: CUDA_ERROR_X (text)", with the driver's number as detail.
HICACHE_LOCAL Error cuda_error(const CudaDriver& driver, CUresult result, const std::string& what,
                               Status status = Status::system_error);

// Makes a context current for a scope. A null context changes nothing.
class HICACHE_LOCAL CudaContextScope {
 public:
  CudaContextScope(const CudaDriver& driver, CUcontext context) : driver_(driver) {
    pushed_ = context != nullptr && driver_.cuCtxPushCurrent(context) == CUDA_SUCCESS;
  }
  CudaContextScope(const CudaContextScope&) = delete;
  CudaContextScope& operator=(const CudaContextScope&) = delete;
  ~CudaContextScope() {
    CUcontext popped = nullptr;
    if (pushed_) driver_.cuCtxPopCurrent(&popped);
  }

 private:
  const CudaDriver& driver_;
  bool pushed_ = false;
};

}  // namespace hicache
