// Kernels of a rank that maps the pool: gather pages of its tensors into pool pages, and scatter pool pages to its
// tensors. A warp moves one row at a time; neighbouring lanes move neighbouring words, so that both sides are read
// and written in whole sectors. The pool is host memory, registered with this GPU's context: a few blocks fill the
// link, and what they take is the model's.
#include "libhicache/src/kernel/page_kernel_arguments.hpp"

using namespace hicache;

namespace {

constexpr std::uint32_t kUnroll = 4;  // loads in flight of a lane
constexpr std::uint32_t kNone = 0xffffffffu;

template <class Word>
__device__ void move_row(const Word* from, Word* to, std::uint32_t words) {
  for (std::uint32_t first = threadIdx.x % 32; first < words; first += 32 * kUnroll) {
    Word value[kUnroll];
#pragma unroll
    for (std::uint32_t i = 0; i < kUnroll; ++i) {
      if (first + 32 * i < words) value[i] = __ldcs(from + first + 32 * i);
    }
#pragma unroll
    for (std::uint32_t i = 0; i < kUnroll; ++i) {
      if (first + 32 * i < words) __stcg(to + first + 32 * i, value[i]);
    }
  }
}

template <class Word, bool kScatter>
__device__ void move(const MoveArguments& a) {
  const std::uint32_t warp = blockIdx.x * kMoveWarps + threadIdx.x / 32;
  const std::uint64_t first = std::uint64_t{warp} * a.items_per_warp;
  const std::uint64_t last = first + a.items_per_warp < a.items ? first + a.items_per_warp : a.items;
  for (std::uint64_t item = first; item < last; ++item) {
    const std::uint32_t piece = static_cast<std::uint32_t>(item / a.rows);
    const std::uint32_t row = static_cast<std::uint32_t>(item - std::uint64_t{piece} * a.rows);
    const std::uint32_t tensor_index = piece / a.page_count;
    const MovePage page = reinterpret_cast<const MovePage*>(a.pages)[piece - tensor_index * a.page_count];
    const MoveTensor tensor = reinterpret_cast<const MoveTensor*>(a.tensors)[tensor_index];
    const std::uint32_t place = a.states != 0 ? page.state : page.page;
    if (place == kNone) continue;
    const std::uint64_t offset = std::uint64_t{row} * a.row_bytes;
    auto* device = reinterpret_cast<Word*>(tensor.address + place * tensor.page_stride + offset);
    auto* pool = reinterpret_cast<Word*>(page.shard + tensor.shard_offset + offset);
    move_row<Word>(kScatter ? pool : device, kScatter ? device : pool, a.row_bytes / sizeof(Word));
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kMoveThreads) hicache_gather_16(const __grid_constant__ MoveArguments a) {
  move<uint4, false>(a);
}
extern "C" __global__ void __launch_bounds__(kMoveThreads) hicache_gather_8(const __grid_constant__ MoveArguments a) {
  move<unsigned long long, false>(a);
}
extern "C" __global__ void __launch_bounds__(kMoveThreads) hicache_scatter_16(const __grid_constant__ MoveArguments a) {
  move<uint4, true>(a);
}
extern "C" __global__ void __launch_bounds__(kMoveThreads) hicache_scatter_8(const __grid_constant__ MoveArguments a) {
  move<unsigned long long, true>(a);
}
