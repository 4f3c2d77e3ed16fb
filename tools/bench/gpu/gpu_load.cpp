#include "tools/bench/gpu/gpu_load.hpp"

#include <cublas_v2.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include <array>
#include <vector>

#include "shm/types.hpp"

namespace hicache::bench {
namespace {

constexpr std::size_t kAhead = 8;  // steps queued: enough that the GPU never waits for this thread
constexpr int kGemmSize = 4096;
constexpr std::uint64_t kStreamBytes = 1 * kGiB;

struct Cublas {
  decltype(&::cublasCreate_v2) create = nullptr;
  decltype(&::cublasDestroy_v2) destroy = nullptr;
  decltype(&::cublasSetStream_v2) set_stream = nullptr;
  // Spelled out: the header overloads it.
  using Gemm = cublasStatus_t (*)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int,
                                  const void*, const void*, cudaDataType, int, const void*, cudaDataType, int,
                                  const void*, void*, cudaDataType, int, cublasComputeType_t,
                                  cublasGemmAlgo_t);
  Gemm gemm = nullptr;
};

Result<Cublas> load_cublas() {
  void* library = nullptr;
  for (const char* name : {"libcublas.so.13", "libcublas.so.12", "libcublas.so"}) {
    if (library == nullptr) library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
  }
  if (library == nullptr) return Error{Status::not_found, "libcublas.so can't be loaded", 0};
  Cublas c;
  c.create = reinterpret_cast<decltype(c.create)>(::dlsym(library, "cublasCreate_v2"));
  c.destroy = reinterpret_cast<decltype(c.destroy)>(::dlsym(library, "cublasDestroy_v2"));
  c.set_stream = reinterpret_cast<decltype(c.set_stream)>(::dlsym(library, "cublasSetStream_v2"));
  c.gemm = reinterpret_cast<Cublas::Gemm>(::dlsym(library, "cublasGemmEx"));
  if (c.create == nullptr || c.destroy == nullptr || c.set_stream == nullptr || c.gemm == nullptr)
    return Error{Status::not_found, "libcublas.so lacks a function", 0};
  return c;
}

Error cublas_error(cublasStatus_t status, const char* what) {
  return Error{Status::system_error, fmt::format("{}: cuBLAS status {}", what, static_cast<int>(status)),
               static_cast<int>(status)};
}

}  // namespace

struct GpuLoad::Body {
  Body(LoadKind load, GpuStream own) : kind(load), stream(std::move(own)) {}
  ~Body() {
    if (handle != nullptr) cublas.destroy(handle);
  }

  Outcome prepare(const Gpu& gpu) {
    if (kind == LoadKind::gemm) return prepare_gemm(gpu);
    for (int i = 0; i < 2; ++i) {
      auto bytes = GpuBytes::allocate(gpu, kStreamBytes);
      if (!bytes) return bytes.error();
      memory.push_back(std::move(*bytes));
    }
    auto found = gpu.kernel("hicache_stream_hbm");
    if (!found) return found.error();
    kernel = *found;
    return success();
  }

  Outcome prepare_gemm(const Gpu& gpu) {
    auto loaded = load_cublas();
    if (!loaded) return loaded.error();
    cublas = *loaded;
    const Driver& d = gpu.driver();
    // Random halves between 1 and 2: products of zeros would be faster than real ones.
    std::vector<std::uint16_t> halves(std::size_t{kGemmSize} * kGemmSize);
    std::uint64_t random = 88172645463325252ull;
    for (std::uint16_t& half : halves) {
      random ^= random << 13;
      random ^= random >> 7;
      random ^= random << 17;
      half = static_cast<std::uint16_t>(0x3c00u | (random & 0x3ffu) | ((random >> 20 & 1u) << 15));
    }
    for (int i = 0; i < 3; ++i) {
      auto bytes = GpuBytes::allocate(gpu, halves.size() * sizeof(std::uint16_t));
      if (!bytes) return bytes.error();
      if (Outcome sent = check(d,
                               d.cuMemcpyHtoDAsync(bytes->address(), halves.data(),
                                                   halves.size() * sizeof(std::uint16_t), stream.get()),
                               "matrix");
          !sent) {
        return sent;
      }
      memory.push_back(std::move(*bytes));
    }
    if (Outcome sent = stream.synchronize(); !sent) return sent;
    if (const auto status = cublas.create(&handle); status != CUBLAS_STATUS_SUCCESS) {
      return cublas_error(status, "cublasCreate");
    }
    if (const auto status = cublas.set_stream(handle, stream.get()); status != CUBLAS_STATUS_SUCCESS) {
      return cublas_error(status, "cublasSetStream");
    }
    return success();
  }

  Outcome step(const Gpu& gpu) {
    if (kind == LoadKind::gemm) {
      const float one = 1;
      const float zero = 0;
      const auto matrix = [&](std::size_t i) {
        return reinterpret_cast<void*>(static_cast<std::uintptr_t>(memory[i].address()));
      };
      const auto status =
          cublas.gemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, kGemmSize, kGemmSize, kGemmSize, &one, matrix(0),
                      CUDA_R_16F, kGemmSize, matrix(1), CUDA_R_16F, kGemmSize, &zero, matrix(2), CUDA_R_16F,
                      kGemmSize, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
      return status == CUBLAS_STATUS_SUCCESS ? success() : Outcome(cublas_error(status, "cublasGemmEx"));
    }
    CUdeviceptr from = memory[0].address();
    CUdeviceptr to = memory[1].address();
    std::uint64_t vectors = kStreamBytes / 16;
    std::array<void*, 3> arguments{&from, &to, &vectors};
    return gpu.launch(kernel, 132 * 8, 1, 512, stream.get(), arguments.data());
  }

  LoadKind kind;
  GpuStream stream;
  std::vector<GpuBytes> memory;
  CUfunction kernel = nullptr;
  Cublas cublas;
  cublasHandle_t handle = nullptr;
};

GpuLoad::GpuLoad(const Gpu& gpu, std::unique_ptr<Body> body) : gpu_(gpu), body_(std::move(body)) {}

Result<std::unique_ptr<GpuLoad>> GpuLoad::start(const Gpu& gpu, LoadKind kind) {
  auto stream = GpuStream::create(gpu);
  if (!stream) return stream.error();
  auto body = std::make_unique<Body>(kind, std::move(*stream));
  if (const Outcome prepared = body->prepare(gpu); !prepared) return prepared.error();
  std::unique_ptr<GpuLoad> load(new GpuLoad(gpu, std::move(body)));
  constexpr double kSize = kGemmSize;
  load->work_ = kind == LoadKind::gemm ? 2 * kSize * kSize * kSize : 2.0 * kStreamBytes;
  load->thread_ = std::thread([raw = load.get()] { raw->run(); });
  return load;
}

GpuLoad::~GpuLoad() {
  stop_.store(true, std::memory_order_relaxed);
  if (thread_.joinable()) thread_.join();
}

void GpuLoad::run() {
  const Driver& d = gpu_.driver();
  std::array<CUevent, kAhead> events{};
  bool good = static_cast<bool>(gpu_.make_current());
  for (CUevent& event : events)
    good = good && d.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS;
  std::uint64_t queued = 0;
  while (good && !stop_.load(std::memory_order_relaxed)) {
    if (queued >= kAhead) {
      good = d.cuEventSynchronize(events[queued % kAhead]) == CUDA_SUCCESS;
      done_.store(queued - kAhead + 1, std::memory_order_relaxed);
    }
    good = good && body_->step(gpu_) &&
           d.cuEventRecord(events[queued % kAhead], body_->stream.get()) == CUDA_SUCCESS;
    ++queued;
  }
  failed_.store(!good, std::memory_order_relaxed);
  static_cast<void>(body_->stream.synchronize());
  for (CUevent event : events) {
    if (event != nullptr) d.cuEventDestroy(event);
  }
}

}  // namespace hicache::bench
