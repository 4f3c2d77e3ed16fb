#include "tools/bench/gpu/gpu.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <vector>

#include "shm/clock.hpp"

// Made by nvcc from kernels.cu: machine code for sm_90 and PTX for everything newer than sm_80.
asm(R"(
  .section .rodata
  .balign 64
  .global hicache_bench_kernels
  .hidden hicache_bench_kernels
hicache_bench_kernels:
  .incbin ")" HICACHE_KERNELS_FILE R"("
  .byte 0
  .previous
)");
extern "C" const unsigned char hicache_bench_kernels[];

namespace hicache::bench {

Result<std::unique_ptr<Gpu>> Gpu::open() {
  const auto driver = load_driver();
  if (!driver) return driver.error();
  const Driver& d = **driver;
  std::unique_ptr<Gpu> gpu(new Gpu(d));
  int count = 0;
  if (const Outcome done = check(d, d.cuDeviceGetCount(&count), "cuDeviceGetCount"); !done)
    return done.error();
  if (count == 0) return Error{Status::not_found, "no GPU is visible", 0};
  if (const Outcome done = check(d, d.cuDeviceGet(&gpu->device_, 0), "cuDeviceGet"); !done)
    return done.error();
  std::array<char, 128> name{};
  if (const Outcome done = check(
          d, d.cuDeviceGetName(name.data(), static_cast<int>(name.size()), gpu->device_), "cuDeviceGetName");
      !done) {
    return done.error();
  }
  gpu->name_ = name.data();
  if (const Outcome done =
          check(d, d.cuDevicePrimaryCtxRetain(&gpu->context_, gpu->device_), "cuDevicePrimaryCtxRetain");
      !done) {
    return done.error();
  }
  if (const Outcome done = gpu->make_current(); !done) return done.error();
  if (const Outcome done = check(d, d.cuModuleLoadData(&gpu->module_, hicache_bench_kernels),
                                 "loading the benchmark's kernels");
      !done) {
    return done.error();
  }
  return gpu;
}

Gpu::~Gpu() {
  if (context_ != nullptr) driver_.cuDevicePrimaryCtxRelease(device_);
}

Outcome Gpu::make_current() const {
  return check(driver_, driver_.cuCtxSetCurrent(context_), "cuCtxSetCurrent");
}

Result<CUfunction> Gpu::kernel(const char* name) const {
  CUfunction function = nullptr;
  if (const Outcome done = check(driver_, driver_.cuModuleGetFunction(&function, module_, name), name); !done)
    return done.error();
  return function;
}

Outcome Gpu::launch(CUfunction kernel, unsigned grid_x, unsigned grid_y, unsigned threads, CUstream stream,
                    void** arguments) const {
  return check(
      driver_,
      driver_.cuLaunchKernel(kernel, grid_x, grid_y, 1, threads, 1, 1, 0, stream, arguments, nullptr),
      "cuLaunchKernel");
}

Result<std::uint64_t> Gpu::free_bytes() const {
  std::size_t free = 0;
  std::size_t total = 0;
  if (const Outcome done = check(driver_, driver_.cuMemGetInfo(&free, &total), "cuMemGetInfo"); !done)
    return done.error();
  return std::uint64_t{free};
}

Result<GpuBytes> GpuBytes::allocate(const Gpu& gpu, std::uint64_t bytes) {
  GpuBytes memory;
  const Driver& d = gpu.driver();
  if (d.cuMemAlloc(&memory.address_, bytes) != CUDA_SUCCESS) {
    return Error{Status::no_space, fmt::format("{} bytes of GPU memory can't be had", bytes), 0};
  }
  memory.gpu_ = &gpu;
  memory.bytes_ = bytes;
  return memory;
}

GpuBytes& GpuBytes::operator=(GpuBytes&& other) noexcept {
  if (this == &other) return *this;
  if (gpu_ != nullptr) gpu_->driver().cuMemFree(address_);
  gpu_ = std::exchange(other.gpu_, nullptr);
  address_ = other.address_;
  bytes_ = other.bytes_;
  return *this;
}

GpuBytes::~GpuBytes() {
  if (gpu_ != nullptr) gpu_->driver().cuMemFree(address_);
}

Result<GpuStream> GpuStream::create(const Gpu& gpu) {
  CUstream stream = nullptr;
  const Driver& d = gpu.driver();
  if (const Outcome done = check(d, d.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
      !done)
    return done.error();
  return GpuStream(gpu, stream);
}

GpuStream::~GpuStream() {
  if (gpu_ != nullptr) gpu_->driver().cuStreamDestroy(stream_);
}

Outcome GpuStream::synchronize() const {
  const Driver& d = gpu_->driver();
  return check(d, d.cuStreamSynchronize(stream_), "cuStreamSynchronize");
}

namespace {

constexpr int kCopyRepeats = 7;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

Result<CopyRates> measure_copies(const Gpu& gpu, std::uint64_t bytes) {
  const Driver& d = gpu.driver();
  auto memory = GpuBytes::allocate(gpu, 2 * bytes);
  if (!memory) return memory.error();
  auto down = GpuStream::create(gpu);
  auto up = GpuStream::create(gpu);
  if (!down) return down.error();
  if (!up) return up.error();
  void* host = nullptr;
  if (const Outcome done = check(d, d.cuMemHostAlloc(&host, 2 * bytes, 0), "cuMemHostAlloc"); !done)
    return done.error();
  auto* host_bytes = static_cast<std::uint8_t*>(host);
  const auto timed = [&](bool load, bool store) -> Result<double> {
    std::vector<double> rates;
    for (int i = 0; i <= kCopyRepeats; ++i) {
      const std::uint64_t start = monotonic_ns();
      CUresult result = CUDA_SUCCESS;
      if (load) result = d.cuMemcpyHtoDAsync(memory->address(), host, bytes, down->get());
      if (store && result == CUDA_SUCCESS)
        result = d.cuMemcpyDtoHAsync(host_bytes + bytes, memory->address() + bytes, bytes, up->get());
      if (result == CUDA_SUCCESS) result = d.cuStreamSynchronize(down->get());
      if (result == CUDA_SUCCESS) result = d.cuStreamSynchronize(up->get());
      if (const Outcome done = check(d, result, "a single large copy"); !done) return done.error();
      const double moved = static_cast<double>(bytes) * ((load ? 1 : 0) + (store ? 1 : 0));
      if (i > 0) rates.push_back(moved / static_cast<double>(monotonic_ns() - start));  // the first warms up
    }
    return median(std::move(rates));
  };
  CopyRates rates;
  Outcome outcome = success();
  for (const auto& [load, store, rate] :
       {std::tuple{true, false, &rates.to_device}, std::tuple{false, true, &rates.to_host},
        std::tuple{true, true, &rates.both}}) {
    const auto measured = timed(load, store);
    if (measured) {
      *rate = *measured;
    } else {
      outcome = measured.error();
    }
  }
  d.cuMemFreeHost(host);
  if (!outcome) return outcome.error();
  return rates;
}

}  // namespace hicache::bench
