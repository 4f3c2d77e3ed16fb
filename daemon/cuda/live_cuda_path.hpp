// The CUDA side where there is a driver and a GPU.
#pragma once

#include <memory>

#include "daemon/cuda/cuda_path.hpp"

namespace hicache::daemon {

// Loads the driver and finds the GPUs; with CudaMode::at_start also makes their contexts and begins to pin.
// Fails with what is missing.
Result<std::unique_ptr<CudaPath>> make_live_cuda_path(const CudaOptions& options);

}  // namespace hicache::daemon
