#include "cuda_driver.hpp"

#include <dlfcn.h>

namespace hicache {
namespace {

// Expands the name first: cuda.h may have given it a version.
#define HICACHE_TEXT_OF_EXPANDED(name) #name
#define HICACHE_TEXT_OF(name) HICACHE_TEXT_OF_EXPANDED(name)

template <class Function>
bool look_up(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  return function != nullptr;
}

Result<CudaDriver> load() {
  // Never unloaded: streams and registered memory outlive every object of ours.
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = ::dlerror();
    return Error{
        Status::not_found,
        std::string("CUDA off: no driver: ") + (why == nullptr ? "libcuda.so.1 can't be loaded" : why), 0};
  }
  CudaDriver driver;
#define HICACHE_CUDA_LOOK_UP(name)                                                                 \
  if (!look_up(library, HICACHE_TEXT_OF(name), driver.name)) {                                     \
    return Error{Status::not_found,                                                                \
                 "CUDA off: the driver is too old, it has no function " HICACHE_TEXT_OF(name), 0}; \
  }
  HICACHE_CLIENT_CUDA_FUNCTIONS(HICACHE_CUDA_LOOK_UP)
#undef HICACHE_CUDA_LOOK_UP
  if (const CUresult result = driver.cuInit(0); result != CUDA_SUCCESS) {
    return cuda_error(driver, result, "CUDA off: cuInit", Status::not_found);
  }
  return driver;
}

}  // namespace

Result<const CudaDriver*> cuda_driver() {
  static const Result<CudaDriver> driver = load();
  if (!driver) return driver.error();
  return &*driver;
}

Error cuda_error(const CudaDriver& driver, CUresult result, const std::string& what, Status status) {
  const char* name = nullptr;
  const char* text = nullptr;
  driver.cuGetErrorName(result, &name);
  driver.cuGetErrorString(result, &text);
  return Error{status,
               what + ": " + (name == nullptr ? "CUDA error " + std::to_string(result) : std::string(name)) +
                   (text == nullptr ? std::string() : " (" + std::string(text) + ")"),
               static_cast<int>(result)};
}

}  // namespace hicache
