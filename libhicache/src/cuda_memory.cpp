// Describes device memory to the daemon: which allocation a pointer lies in, and how that can be exported.
#include <cstring>

#include "cuda_driver.hpp"
#include "hicache/cuda.hpp"

namespace hicache {
namespace {

template <class T>
CUresult attribute(const CudaDriver& driver, CUpointer_attribute which, CUdeviceptr pointer, T& value) {
  return driver.cuPointerGetAttribute(&value, which, pointer);
}

std::string hex(CUdeviceptr pointer) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (int shift = 60; shift >= 0; shift -= 4) {
    const auto digit = static_cast<unsigned>(pointer >> shift) & 15u;
    if (digit != 0 || !text.empty() || shift == 0) text += kDigits[digit];
  }
  return "0x" + text;
}

// The allocation around a pointer.
struct Base {
  CUdeviceptr start = 0;
  std::uint64_t bytes = 0;
};

Outcome check_inside(const CudaRange& range, CUdeviceptr pointer, const Base& base, const char* what) {
  const std::uint64_t offset = pointer - base.start;
  if (pointer >= base.start && offset <= base.bytes && range.bytes <= base.bytes - offset) return success();
  return Error{Status::invalid_argument,
               "the range of " + std::to_string(range.bytes) + " bytes at " + hex(pointer) + " leaves its " +
                   what + " of " + std::to_string(base.bytes) + " bytes at " + hex(base.start),
               0};
}

Outcome export_by_ipc(const CudaDriver& driver, const CudaRange& range, CUdeviceptr pointer,
                      CUcontext context, DeviceAllocation& out) {
  Base base;
  std::size_t bytes = 0;
  if (const CUresult r = attribute(driver, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, pointer, base.start);
      r != CUDA_SUCCESS) {
    return cuda_error(driver, r, "start of the allocation at " + hex(pointer));
  }
  if (const CUresult r = attribute(driver, CU_POINTER_ATTRIBUTE_RANGE_SIZE, pointer, bytes);
      r != CUDA_SUCCESS) {
    return cuda_error(driver, r, "size of the allocation at " + hex(pointer));
  }
  base.bytes = bytes;
  if (Outcome inside = check_inside(range, pointer, base, "allocation"); !inside) return inside;
  const CudaContextScope scope(driver, context);
  CUipcMemHandle handle{};
  if (const CUresult r = driver.cuIpcGetMemHandle(&handle, base.start); r != CUDA_SUCCESS) {
    return cuda_error(driver, r, "CUDA IPC handle of the allocation at " + hex(base.start),
                      Status::not_permitted);
  }
  static_assert(sizeof handle.reserved == sizeof(DeviceAllocation::ipc_handle));
  std::memcpy(out.ipc_handle.data(), handle.reserved, sizeof handle.reserved);
  out.export_kind = CudaExport::ipc_handle;
  out.base_bytes = base.bytes;
  out.base_offset = pointer - base.start;
  return success();
}

// Memory of cuMemCreate: each physical allocation has a mapping of its own, and travels as a descriptor.
Outcome export_by_descriptor(const CudaDriver& driver, const CudaRange& range, CUdeviceptr pointer,
                             CudaAllocation& out) {
  Base base;
  std::size_t bytes = 0;
  if (const CUresult r = attribute(driver, CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, pointer, base.start);
      r != CUDA_SUCCESS) {
    return cuda_error(driver, r, "start of the mapping at " + hex(pointer), Status::not_permitted);
  }
  if (const CUresult r = attribute(driver, CU_POINTER_ATTRIBUTE_MAPPING_SIZE, pointer, bytes);
      r != CUDA_SUCCESS) {
    return cuda_error(driver, r, "size of the mapping at " + hex(pointer), Status::not_permitted);
  }
  base.bytes = bytes;
  if (Outcome inside =
          check_inside(range, pointer, base, "physical allocation (describe every part on its own)");
      !inside) {
    return inside;
  }
  CUmemGenericAllocationHandle handle = 0;
  if (const CUresult r = driver.cuMemRetainAllocationHandle(
          &handle, reinterpret_cast<void*>(static_cast<std::uintptr_t>(base.start)));
      r != CUDA_SUCCESS) {
    return cuda_error(driver, r,
                      "memory at " + hex(pointer) + " is neither open to CUDA IPC nor of cuMemCreate",
                      Status::not_permitted);
  }
  int fd = -1;
  const CUresult exported =
      driver.cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  driver.cuMemRelease(handle);
  if (exported != CUDA_SUCCESS) {
    return cuda_error(driver, exported,
                      "memory of cuMemCreate at " + hex(pointer) +
                          " can't be exported: create it with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",
                      Status::not_permitted);
  }
  out.fd = UniqueFd(fd);
  out.allocation.export_kind = CudaExport::posix_fd;
  out.allocation.base_bytes = base.bytes;
  out.allocation.base_offset = pointer - base.start;
  return success();
}

}  // namespace

Result<CudaAllocation> describe_cuda_allocation(const CudaRange& range) {
  const auto loaded = cuda_driver();
  if (!loaded) return loaded.error();
  const CudaDriver& driver = **loaded;
  const auto pointer = static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(range.pointer));
  if (pointer == 0 || range.bytes == 0) {
    return Error{Status::invalid_argument,
                 "range of " + std::to_string(range.bytes) + " bytes at " + hex(pointer) +
                     ": expected at least 1 byte of device memory",
                 0};
  }
  CUmemorytype type{};
  if (attribute(driver, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer, type) != CUDA_SUCCESS) {
    return Error{Status::invalid_argument, hex(pointer) + " is no memory that CUDA knows", 0};
  }
  unsigned managed = 0;
  attribute(driver, CU_POINTER_ATTRIBUTE_IS_MANAGED, pointer, managed);
  if (type != CU_MEMORYTYPE_DEVICE || managed != 0) {
    return Error{Status::not_permitted,
                 std::string(managed != 0 ? "managed" : "host") + " memory at " + hex(pointer) +
                     " can't be exported: expected device memory of cudaMalloc or cuMemCreate",
                 0};
  }
  CUmemoryPool pool = nullptr;
  if (attribute(driver, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, pointer, pool) == CUDA_SUCCESS &&
      pool != nullptr) {
    return Error{Status::not_permitted,
                 "memory of cudaMallocAsync at " + hex(pointer) +
                     " can't be exported: CUDA IPC refuses memory pools; allocate KV buffers with cudaMalloc",
                 0};
  }
  int ordinal = -1;
  CUdevice device = 0;
  CUuuid uuid{};
  CUresult r = attribute(driver, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer, ordinal);
  if (r == CUDA_SUCCESS) r = driver.cuDeviceGet(&device, ordinal);
  if (r == CUDA_SUCCESS) r = driver.cuDeviceGetUuid(&uuid, device);
  if (r != CUDA_SUCCESS) return cuda_error(driver, r, "GPU of the memory at " + hex(pointer));

  CudaAllocation out;
  out.allocation.kind = DeviceKind::cuda;
  out.allocation.bytes = range.bytes;
  static_assert(sizeof uuid.bytes == sizeof(DeviceAllocation::gpu_uuid));
  std::memcpy(out.allocation.gpu_uuid.data(), uuid.bytes, sizeof uuid.bytes);
  // 32 bits wide whatever the driver writes: it documents a boolean, which is an int.
  unsigned legacy = 0;
  attribute(driver, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, pointer, legacy);
  CUcontext context = nullptr;
  attribute(driver, CU_POINTER_ATTRIBUTE_CONTEXT, pointer, context);
  const Outcome exported = (legacy & 0xffu) != 0
                               ? export_by_ipc(driver, range, pointer, context, out.allocation)
                               : export_by_descriptor(driver, range, pointer, out);
  if (!exported) return exported.error();
  return out;
}

Outcome register_cuda_buffers(Session& session, std::span<const CudaRange> ranges,
                              std::span<const DeviceTensor> tensors, std::uint32_t pages,
                              std::uint32_t timeout_ms, std::uint32_t states) {
  DeviceGeometry geometry;
  geometry.pages = pages;
  geometry.states = states;
  geometry.tensors.assign(tensors.begin(), tensors.end());
  std::vector<CudaAllocation> described;
  std::vector<int> fds;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    auto one = describe_cuda_allocation(ranges[i]);
    if (!one) return Error{one.status(), "range " + std::to_string(i) + ": " + one.error().message, 0};
    geometry.allocations.push_back(one->allocation);
    if (one->fd.valid()) fds.push_back(one->fd.get());
    described.push_back(std::move(*one));
  }
  return session.register_memory(geometry, fds, ranges, timeout_ms);
}

}  // namespace hicache
