#include "tools/bench/gpu/driver.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

namespace hicache::bench {
namespace {

// Expands the name first: cuda.h may have given it a version.
#define HICACHE_TEXT_OF_EXPANDED(name) #name
#define HICACHE_TEXT_OF(name) HICACHE_TEXT_OF_EXPANDED(name)

template <class Function>
bool look_up(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  return function != nullptr;
}

Result<Driver> load() {
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);  // for the life of the process
  if (library == nullptr) {
    const char* why = ::dlerror();
    return Error{Status::not_found, fmt::format("no CUDA driver: {}", why == nullptr ? "unknown" : why), 0};
  }
  Driver driver;
#define HICACHE_CUDA_LOOK_UP(name)                                                                \
  if (!look_up(library, HICACHE_TEXT_OF(name), driver.name)) {                                    \
    return Error{Status::not_found, "the CUDA driver has no function " HICACHE_TEXT_OF(name), 0}; \
  }
  HICACHE_BENCH_CUDA_FUNCTIONS(HICACHE_CUDA_LOOK_UP)
#undef HICACHE_CUDA_LOOK_UP
  if (const Outcome ready = check(driver, driver.cuInit(0), "cuInit"); !ready) {
    return Error{Status::not_found, ready.error().message, 0};
  }
  return driver;
}

}  // namespace

Result<const Driver*> load_driver() {
  static const Result<Driver> driver = load();
  if (!driver) return driver.error();
  return &*driver;
}

Outcome check(const Driver& driver, CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return success();
  const char* name = nullptr;
  driver.cuGetErrorName(result, &name);
  return Error{Status::system_error,
               fmt::format("{}: {}", what, name == nullptr ? "unknown CUDA error" : name), result};
}

}  // namespace hicache::bench
