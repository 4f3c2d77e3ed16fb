// A GPU as a benchmark's rank uses it: primary context, device memory, streams, events, and the page
// pattern's kernels.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "shm/status.hpp"
#include "tools/bench/gpu/driver.hpp"

namespace hicache::bench {

// Owns the primary context of device 0 (of those visible) and makes it current in the thread that opens it.
class Gpu {
 public:
  static Result<std::unique_ptr<Gpu>> open();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;
  ~Gpu();

  [[nodiscard]] const Driver& driver() const { return driver_; }
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] CUdevice device() const { return device_; }
  // For every further thread.
  Outcome make_current() const;

  // Kernels of kernels.cu by name; fails where the GPU is older than what they were compiled for.
  Result<CUfunction> kernel(const char* name) const;
  Outcome launch(CUfunction kernel, unsigned grid_x, unsigned grid_y, unsigned threads, CUstream stream,
                 void** arguments) const;
  [[nodiscard]] Result<std::uint64_t> free_bytes() const;

 private:
  explicit Gpu(const Driver& driver) : driver_(driver) {}
  const Driver& driver_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  CUmodule module_ = nullptr;
  std::string name_;
};

// Device memory of cuMemAlloc. Move-only; its Gpu outlives it.
class GpuBytes {
 public:
  GpuBytes() = default;
  static Result<GpuBytes> allocate(const Gpu& gpu, std::uint64_t bytes);
  GpuBytes(GpuBytes&& other) noexcept
      : gpu_(std::exchange(other.gpu_, nullptr)), address_(other.address_), bytes_(other.bytes_) {}
  GpuBytes& operator=(GpuBytes&& other) noexcept;
  ~GpuBytes();
  [[nodiscard]] CUdeviceptr address() const { return address_; }
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }

 private:
  const Gpu* gpu_ = nullptr;
  CUdeviceptr address_ = 0;
  std::uint64_t bytes_ = 0;
};

// A stream that does not wait for the default one. Its Gpu outlives it.
class GpuStream {
 public:
  static Result<GpuStream> create(const Gpu& gpu);
  GpuStream(GpuStream&& other) noexcept
      : gpu_(std::exchange(other.gpu_, nullptr)), stream_(std::exchange(other.stream_, nullptr)) {}
  GpuStream& operator=(GpuStream&&) = delete;
  ~GpuStream();
  [[nodiscard]] CUstream get() const { return stream_; }
  Outcome synchronize() const;

 private:
  GpuStream(const Gpu& gpu, CUstream stream) : gpu_(&gpu), stream_(stream) {}
  const Gpu* gpu_;
  CUstream stream_;
};

// What one large copy between pinned host memory and the GPU reaches, in 10^9 bytes a second.
struct CopyRates {
  double to_device = 0;
  double to_host = 0;
  double both = 0;  // sum of the two at once
};
Result<CopyRates> measure_copies(const Gpu& gpu, std::uint64_t bytes);

}  // namespace hicache::bench
