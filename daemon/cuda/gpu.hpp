// A GPU of this machine, and the daemon's context on it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "daemon/cuda/driver.hpp"
#include "shm/types.hpp"

namespace hicache::daemon {

using GpuUuid = std::array<std::uint8_t, 16>;

// "GPU-01234567-89ab-...", as the driver's tools print it.
std::string uuid_text(const GpuUuid& uuid);

struct GpuDevice {
  CUdevice device = 0;
  std::uint32_t index = 0;  // in list_gpus
  GpuUuid uuid{};
  std::string name;
  NumaNode node;  // nearest to it; none = the machine has one, or does not say
};

// The GPUs that the driver shows to this process.
Result<std::vector<GpuDevice>> list_gpus(const CudaDriver& driver);

// A retained context. Shared by everything that lives in it, and released with the last user. Thread-safe.
class Gpu {
 public:
  static Result<std::shared_ptr<Gpu>> open(const CudaDriver& driver, const GpuDevice& device);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  // Whether this GPU's copy engines can write into the other's memory.
  [[nodiscard]] bool can_reach(const Gpu& other) const;
  // Makes the context the calling thread's current one.
  [[nodiscard]] Outcome use() const;
  [[nodiscard]] const CudaDriver& driver() const { return driver_; }
  [[nodiscard]] const GpuDevice& device() const { return device_; }

 private:
  Gpu(const CudaDriver& driver, GpuDevice device, CUcontext context)
      : driver_(driver), device_(std::move(device)), context_(context) {}
  const CudaDriver& driver_;
  const GpuDevice device_;
  const CUcontext context_;
};

}  // namespace hicache::daemon
