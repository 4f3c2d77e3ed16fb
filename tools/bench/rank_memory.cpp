#include "tools/bench/rank_memory.hpp"

#include <fmt/format.h>

#include "tools/bench/bench_model.hpp"
#include "tools/bench/page_pattern.hpp"
#ifdef HICACHE_CUDA
#include "tools/bench/gpu/gpu_pages.hpp"
#endif

namespace hicache::bench {
namespace {

class HostRankMemory : public RankMemory {
 public:
  HostRankMemory(DeviceMemory memory, const NamespaceSpec& spec)
      : memory_(std::move(memory)), digest_(spec.digest()) {}

  Outcome register_with(Session& session) override { return memory_.register_with(session); }

  Outcome fill(std::span<const KeyedPage> pages, std::uint32_t shard) override {
    for_each_piece(pages, shard,
                   [](std::span<std::uint8_t> piece, std::uint64_t base, const KeyedPage&,
                      const DeviceTensor&) { fill_piece(piece, base); });
    return success();
  }
  Outcome poison(std::span<const KeyedPage> pages) override {
    for (const KeyedPage& page : pages) {
      for (const DeviceTensor& tensor : memory_.geometry().tensors)
        bench::poison(memory_.piece(tensor, page.page));
    }
    return success();
  }
  Result<PatternCheck> verify(std::span<const KeyedPage> pages, std::uint32_t shard) override {
    PatternCheck out;
    for_each_piece(pages, shard,
                   [&](std::span<std::uint8_t> piece, std::uint64_t base, const KeyedPage& page,
                       const DeviceTensor& tensor) {
                     const std::uint64_t wrong = count_wrong_words(piece, base);
                     out.words += piece.size() / sizeof(std::uint64_t);
                     out.wrong += wrong;
                     if (wrong == 0 || !out.first.empty()) return;
                     out.first = fmt::format("device page {}, layer {}, kind {}", page.page.value,
                                             tensor.layer, static_cast<std::uint32_t>(tensor.kind));
                   });
    return out;
  }

 private:
  template <class Visit>
  void for_each_piece(std::span<const KeyedPage> pages, std::uint32_t shard, Visit&& visit) {
    for (const KeyedPage& page : pages) {
      for (const DeviceTensor& tensor : memory_.geometry().tensors) {
        visit(memory_.piece(tensor, page.page),
              piece_base({digest_, page.key, shard, tensor.layer, tensor.kind}), page, tensor);
      }
    }
  }

  DeviceMemory memory_;
  PrefixHash digest_;
};

#ifdef HICACHE_CUDA
class GpuRankMemory : public RankMemory {
 public:
  GpuRankMemory(std::unique_ptr<Gpu> gpu, std::unique_ptr<GpuPages> pages)
      : gpu_(std::move(gpu)), pages_(std::move(pages)) {}

  Outcome register_with(Session& session) override { return pages_->register_with(session); }
  Outcome fill(std::span<const KeyedPage> pages, std::uint32_t shard) override {
    const Outcome put = pages_->fill(pages, shard);
    return put ? pages_->synchronize() : put;
  }
  Outcome poison(std::span<const KeyedPage> pages) override {
    const Outcome put = pages_->poison(pages);
    return put ? pages_->synchronize() : put;
  }
  Result<PatternCheck> verify(std::span<const KeyedPage> pages, std::uint32_t shard) override {
    return pages_->verify(pages, shard);
  }

 private:
  std::unique_ptr<Gpu> gpu_;  // outlives what lies on it
  std::unique_ptr<GpuPages> pages_;
};
#endif

Result<std::unique_ptr<RankMemory>> create_on_gpu([[maybe_unused]] const NamespaceSpec& spec,
                                                  [[maybe_unused]] std::uint32_t pages) {
#ifdef HICACHE_CUDA
  auto gpu = Gpu::open();
  if (!gpu) return gpu.error();
  auto memory = GpuPages::create(**gpu, spec, pages, BufferLayout::together);
  if (!memory) return memory.error();
  return std::unique_ptr<RankMemory>(new GpuRankMemory(std::move(*gpu), std::move(*memory)));
#else
  return Error{Status::not_found, "CUDA off: " HICACHE_CUDA_OFF_REASON, 0};
#endif
}

}  // namespace

Result<std::unique_ptr<RankMemory>> RankMemory::create(DeviceKind kind, const NamespaceSpec& spec,
                                                       std::uint32_t pages) {
  if (kind == DeviceKind::cuda) return create_on_gpu(spec, pages);
  auto memory = DeviceMemory::create(spec, pages);
  if (!memory) return memory.error();
  return std::unique_ptr<RankMemory>(new HostRankMemory(std::move(*memory), spec));
}

}  // namespace hicache::bench
