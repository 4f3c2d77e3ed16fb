// Many copies in one call of the driver (cuMemcpyBatchAsync), which CUDA 13 has.
#pragma once

#include <vector>

#include "daemon/cuda/driver.hpp"

namespace hicache::daemon {

[[nodiscard]] bool can_copy_batches(const CudaDriver& driver);
// Equally long lists. The copies run in any order, as one piece of work of the stream.
CUresult copy_batch(const CudaDriver& driver, std::vector<CUdeviceptr>& to, std::vector<CUdeviceptr>& from,
                    std::vector<std::size_t>& bytes, CUstream stream);

}  // namespace hicache::daemon
