// A rank's KV buffers in GPU memory, and kernels that fill, spoil and check whole pages of them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "libhicache/include/hicache/cuda.hpp"
#include "shm/namespace_spec.hpp"
#include "tools/bench/gpu/gpu.hpp"
#include "tools/bench/gpu/kernel_arguments.hpp"
#include "tools/bench/rank_memory.hpp"

namespace hicache::bench {

// How an engine allocates its KV tensors.
enum class BufferLayout : std::uint32_t {
  separate,  // an allocation per layer and kind
  together,  // all of them one after the other in one allocation
  blocks,    // one allocation, a page's pieces of all of them behind each other
};
constexpr const char* name_of(BufferLayout layout) {
  switch (layout) {
    case BufferLayout::separate:
      return "separate";
    case BufferLayout::together:
      return "together";
    case BufferLayout::blocks:
      return "blocks";
  }
  return "unknown";
}

class GpuPages {
 public:
  // `gap` bytes lie before the first tensor of each allocation, so that registered ranges begin inside one.
  static Result<std::unique_ptr<GpuPages>> create(const Gpu& gpu, const NamespaceSpec& spec,
                                                  std::uint32_t pages, BufferLayout layout,
                                                  std::uint64_t gap = 0);
  Outcome register_with(Session& session) const;

  [[nodiscard]] std::uint32_t pages() const { return pages_; }
  [[nodiscard]] const std::vector<DeviceTensor>& tensors() const { return tensors_; }
  [[nodiscard]] CUstream stream() const { return stream_.get(); }

  // Each puts its kernel into stream(); fill and poison return at once, verify waits for its findings.
  Outcome fill(std::span<const KeyedPage> pages, std::uint32_t shard);
  Outcome poison(std::span<const KeyedPage> pages);
  Result<PatternCheck> verify(std::span<const KeyedPage> pages, std::uint32_t shard);
  Outcome synchronize() const { return stream_.synchronize(); }
  // Pages of which the host finds another pattern than verify would look for: checks the kernels themselves.
  Result<std::uint64_t> count_wrong_on_host(std::span<const KeyedPage> pages, std::uint32_t shard) const;

 private:
  GpuPages(const Gpu& gpu, const NamespaceSpec& spec, std::uint32_t pages, GpuStream stream)
      : gpu_(gpu), spec_(spec), digest_(spec.digest()), pages_(pages), stream_(std::move(stream)) {}
  Outcome prepare();
  Outcome send(std::span<const KeyedPage> pages);
  Outcome upload(const GpuBytes& to, const void* from, std::uint64_t bytes, const char* what);
  [[nodiscard]] PatternNamespace space(std::uint32_t shard) const;

  const Gpu& gpu_;
  NamespaceSpec spec_;
  PrefixHash digest_;
  std::uint32_t pages_;
  GpuStream stream_;
  std::vector<GpuBytes> memory_;
  std::vector<CudaRange> ranges_;
  std::vector<DeviceTensor> tensors_;
  GpuBytes tensor_list_;  // PatternTensor of every tensor
  GpuBytes page_list_;    // PatternPage of the pages in work
  GpuBytes findings_;
  CUfunction fill_ = nullptr;
  CUfunction poison_ = nullptr;
  CUfunction verify_ = nullptr;
};

}  // namespace hicache::bench
