// What happens meanwhile: a model's matrix products or a kernel that streams HBM, without a pause; or another
// rank that never raises its write fence.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "tools/bench/gpu/gpu.hpp"

namespace hicache::bench {

enum class LoadKind : std::uint32_t { none, gemm, stream, silent_rank };
constexpr const char* name_of(LoadKind kind) {
  switch (kind) {
    case LoadKind::none:
      return "alone";
    case LoadKind::gemm:
      return "gemm";
    case LoadKind::stream:
      return "stream";
    case LoadKind::silent_rank:
      return "silent";
  }
  return "unknown";
}

// Runs from start to destruction on a thread and a stream of its own, with a few steps queued ahead.
class GpuLoad {
 public:
  // gemm or stream. gemm: fp16 products of 4096 cubed by cuBLAS, which is loaded at run time; not_found where
  // it is missing.
  static Result<std::unique_ptr<GpuLoad>> start(const Gpu& gpu, LoadKind kind);
  GpuLoad(const GpuLoad&) = delete;
  GpuLoad& operator=(const GpuLoad&) = delete;
  ~GpuLoad();

  // Steps done so far. Rates of a window are differences of it over time.
  [[nodiscard]] std::uint64_t steps() const { return done_.load(std::memory_order_relaxed); }
  // Operations (gemm) or bytes moved (stream) of one step.
  [[nodiscard]] double work_per_step() const { return work_; }
  // Why it stopped early; "" while all is well. After the thread has ended.
  [[nodiscard]] bool failed() const { return failed_.load(std::memory_order_relaxed); }

 private:
  struct Body;
  GpuLoad(const Gpu& gpu, std::unique_ptr<Body> body);
  void run();

  const Gpu& gpu_;
  std::unique_ptr<Body> body_;
  double work_ = 0;
  std::atomic<std::uint64_t> done_{0};
  std::atomic<bool> stop_{false};
  std::atomic<bool> failed_{false};
  std::thread thread_;
};

}  // namespace hicache::bench
