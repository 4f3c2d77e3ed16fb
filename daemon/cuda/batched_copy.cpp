#include "daemon/cuda/batched_copy.hpp"

namespace hicache::daemon {

#if CUDA_VERSION >= 13000

bool can_copy_batches(const CudaDriver& driver) {
  return driver.cuMemcpyBatchAsync != nullptr;
}

CUresult copy_batch(const CudaDriver& driver, std::vector<CUdeviceptr>& to, std::vector<CUdeviceptr>& from,
                    std::vector<std::size_t>& bytes, CUstream stream) {
  CUmemcpyAttributes attributes{};
  // Fences order a page's bytes before its copy is put on the stream, and its reuse behind the stream's end.
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  std::size_t first = 0;
  return driver.cuMemcpyBatchAsync(to.data(), from.data(), bytes.data(), bytes.size(), &attributes, &first, 1,
                                   stream);
}

#else

bool can_copy_batches(const CudaDriver&) {
  return false;
}
CUresult copy_batch(const CudaDriver&, std::vector<CUdeviceptr>&, std::vector<CUdeviceptr>&,
                    std::vector<std::size_t>&, CUstream) {
  return CUDA_ERROR_NOT_SUPPORTED;
}

#endif

}  // namespace hicache::daemon
