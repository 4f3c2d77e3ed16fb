// The benchmark's kernels: the page pattern in device memory, and a load that streams HBM. None of them is
// part of the data path.
#include "tools/bench/gpu/kernel_arguments.hpp"
#include "tools/bench/pattern_math.hpp"

using namespace hicache::bench;

namespace {

constexpr std::uint64_t kPoison = 0xa5a5a5a5a5a5a5a5ull;

__device__ std::uint64_t* piece_of(const PatternPage& page, const PatternTensor& tensor) {
  return reinterpret_cast<std::uint64_t*>(tensor.address + page.page * tensor.page_stride);
}

}  // namespace

// Grid: pages by tensors.
extern "C" __global__ void hicache_fill(PatternNamespace space, const PatternPage* pages,
                                        const PatternTensor* tensors) {
  const PatternPage page = pages[blockIdx.x];
  const PatternTensor tensor = tensors[blockIdx.y];
  const std::uint64_t base = pattern_base(space.digest, page.key, space.shard, tensor.layer, tensor.kind);
  std::uint64_t* words = piece_of(page, tensor);
  for (std::uint32_t i = threadIdx.x; i < tensor.words; i += blockDim.x) words[i] = pattern_word(base, i);
}

extern "C" __global__ void hicache_poison(const PatternPage* pages, const PatternTensor* tensors) {
  const PatternTensor tensor = tensors[blockIdx.y];
  std::uint64_t* words = piece_of(pages[blockIdx.x], tensor);
  for (std::uint32_t i = threadIdx.x; i < tensor.words; i += blockDim.x) words[i] = kPoison;
}

extern "C" __global__ void hicache_verify(PatternNamespace space, const PatternPage* pages,
                                          const PatternTensor* tensors, PatternFindings* findings) {
  const PatternPage page = pages[blockIdx.x];
  const PatternTensor tensor = tensors[blockIdx.y];
  const std::uint64_t base = pattern_base(space.digest, page.key, space.shard, tensor.layer, tensor.kind);
  const std::uint64_t* words = piece_of(page, tensor);
  std::uint32_t wrong = 0;
  std::uint32_t poison = 0;
  for (std::uint32_t i = threadIdx.x; i < tensor.words; i += blockDim.x) {
    if (words[i] != pattern_word(base, i)) ++wrong;
    if (words[i] == kPoison) ++poison;
  }
  if (wrong == 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(&findings->wrong_words), wrong);
  atomicAdd(reinterpret_cast<unsigned long long*>(&findings->poison_words), poison);
  atomicMin(reinterpret_cast<unsigned long long*>(&findings->first_wrong),
            (static_cast<unsigned long long>(blockIdx.x) << 32) | blockIdx.y);
}

// Reads `from` and writes `to`, both of `count` 16-byte vectors: bound by HBM.
extern "C" __global__ void hicache_stream_hbm(const uint4* from, uint4* to, std::uint64_t count) {
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    uint4 v = from[i];
    v.x += 1;
    to[i] = v;
  }
}

// Keeps a stream busy for about this many nanoseconds.
extern "C" __global__ void hicache_delay(std::uint64_t nanoseconds) {
  std::uint64_t start = 0;
  std::uint64_t now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}
