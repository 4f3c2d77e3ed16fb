#include "daemon/cuda/gpu.hpp"

#include <cstring>
#include <utility>

#include "daemon/numa/pool_nodes.hpp"

namespace hicache::daemon {

std::string uuid_text(const GpuUuid& uuid) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "GPU-";
  for (std::size_t i = 0; i < uuid.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += kDigits[uuid[i] >> 4];
    text += kDigits[uuid[i] & 15];
  }
  return text;
}

Result<std::vector<GpuDevice>> list_gpus(const CudaDriver& driver) {
  int count = 0;
  if (const CUresult r = driver.cuDeviceGetCount(&count); r != CUDA_SUCCESS) {
    return cuda_error(driver, r, "cuDeviceGetCount");
  }
  std::vector<GpuDevice> gpus(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) {
    GpuDevice& gpu = gpus[static_cast<std::size_t>(i)];
    CUuuid uuid{};
    char name[128] = {};
    CUresult r = driver.cuDeviceGet(&gpu.device, i);
    if (r == CUDA_SUCCESS) r = driver.cuDeviceGetUuid(&uuid, gpu.device);
    if (r == CUDA_SUCCESS) r = driver.cuDeviceGetName(name, sizeof name - 1, gpu.device);
    if (r != CUDA_SUCCESS) return cuda_error(driver, r, "GPU " + std::to_string(i));
    static_assert(sizeof uuid.bytes == sizeof(GpuUuid));
    std::memcpy(gpu.uuid.data(), uuid.bytes, sizeof uuid.bytes);
    gpu.name = name;
    // Without it the GPU serves as well, its pages lie wherever there is room.
    char bus[32] = {};
    if (driver.cuDeviceGetPCIBusId(bus, sizeof bus - 1, gpu.device) == CUDA_SUCCESS)
      gpu.node = node_of_pci_device(bus);
    gpu.index = static_cast<std::uint32_t>(i);
  }
  return gpus;
}

Result<std::shared_ptr<Gpu>> Gpu::open(const CudaDriver& driver, const GpuDevice& device) {
  CUcontext context = nullptr;
  if (const CUresult r = driver.cuDevicePrimaryCtxRetain(&context, device.device); r != CUDA_SUCCESS) {
    return cuda_error(driver, r, "no context on " + uuid_text(device.uuid));
  }
  return std::shared_ptr<Gpu>(new Gpu(driver, device, context));
}

Gpu::~Gpu() {
  driver_.cuDevicePrimaryCtxRelease(device_.device);
}

bool Gpu::can_reach(const Gpu& other) const {
  int can = 0;
  return driver_.cuDeviceCanAccessPeer(&can, device_.device, other.device_.device) == CUDA_SUCCESS &&
         can != 0;
}

Outcome Gpu::use() const {
  if (const CUresult r = driver_.cuCtxSetCurrent(context_); r != CUDA_SUCCESS) {
    return cuda_error(driver_, r, "context of " + uuid_text(device_.uuid));
  }
  return success();
}

}  // namespace hicache::daemon
