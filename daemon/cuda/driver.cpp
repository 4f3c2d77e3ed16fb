#include "daemon/cuda/driver.hpp"

#include <dlfcn.h>

namespace hicache::daemon {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

Result<const CudaDriver*> load() {
  // Never closed: the driver's own threads run in it.
  void* library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = ::dlerror();
    return Error{Status::not_found,
                 std::string("the CUDA driver cannot be loaded: ") + (reason == nullptr ? kLibrary : reason),
                 0};
  }
  static CudaDriver driver;
  std::string missing;
  const auto find = [&](const char* name) {
    void* symbol = ::dlsym(library, name);
    if (symbol == nullptr) missing += (missing.empty() ? "" : ", ") + std::string(name);
    return symbol;
  };
#define HICACHE_CUDA_TEXT(name) #name
#define HICACHE_CUDA_FIND(name) \
  driver.name = reinterpret_cast<decltype(driver.name)>(find(HICACHE_CUDA_TEXT(name)));
  HICACHE_DAEMON_CUDA_FUNCTIONS(HICACHE_CUDA_FIND)
#undef HICACHE_CUDA_FIND
#define HICACHE_CUDA_LOOK(name) \
  driver.name = reinterpret_cast<decltype(driver.name)>(::dlsym(library, HICACHE_CUDA_TEXT(name)));
  HICACHE_DAEMON_CUDA_OPTIONAL(HICACHE_CUDA_LOOK)
#undef HICACHE_CUDA_LOOK
#undef HICACHE_CUDA_TEXT
  if (!missing.empty()) {
    return Error{
        Status::version_mismatch,
        std::string(kLibrary) + " is too old: it lacks " + missing + ", expected a driver of CUDA 12", 0};
  }
  if (const CUresult result = driver.cuInit(0); result != CUDA_SUCCESS) {
    if (result == CUDA_ERROR_NO_DEVICE) return Error{Status::not_found, "no GPU is visible", 0};
    return cuda_error(driver, result, "cuInit");
  }
  return &driver;
}

}  // namespace

Result<const CudaDriver*> cuda_driver() {
  static const Result<const CudaDriver*> loaded = load();
  return loaded;
}

Error cuda_error(const CudaDriver& driver, CUresult result, const std::string& what, Status status) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (driver.cuGetErrorName(result, &name) != CUDA_SUCCESS) name = nullptr;
  if (driver.cuGetErrorString(result, &text) != CUDA_SUCCESS) text = nullptr;
  return Error{status,
               what + ": " + (name == nullptr ? "CUDA error " + std::to_string(result) : name) + " (" +
                   (text == nullptr ? "no text" : text) + ")",
               0};
}

}  // namespace hicache::daemon
