// Kernels that pack pages of a rank's tensors into a slot of its staging memory, and unpack them. A few blocks
// are enough for the link: the rest of the GPU stays the model's.
#include "libhicache/src/staging/kernel_arguments.hpp"

using namespace hicache;

namespace {

constexpr std::uint32_t kUnroll = 4;  // loads in flight of a thread

// Both places of vector `v` of a slot, counted tensor by tensor: neighbouring threads stay in one tensor, whose
// pages a multiprocessor's address cache can hold, and both sides are read and written in whole sectors.
template <class Vector>
struct Place {
  Vector* tensor;
  Vector* slot;
  __device__ Place(const PackArguments& a, const PackPart& part, std::uint32_t v) {
    const std::uint32_t piece = v / a.piece_vectors;
    const std::uint32_t offset = v - piece * a.piece_vectors;
    const std::uint32_t row_piece = piece / part.pages;  // kind and layer
    const std::uint32_t row = piece - row_piece * part.pages;
    const std::uint32_t kind = row_piece / part.layers;
    const std::uint32_t layer = part.first_layer + row_piece - kind * part.layers;
    const PackTensor t = reinterpret_cast<const PackTensor*>(a.tensors)[kind * a.layers + layer];
    tensor = reinterpret_cast<Vector*>(t.address + a.page[part.first_page + row] * t.page_stride) + offset;
    const std::uint32_t packed = (row * a.kinds * part.layers + row_piece) * a.piece_vectors + offset;
    slot = reinterpret_cast<Vector*>(a.memory + part.slot * a.slot_bytes) + packed;
  }
};

template <class Vector, bool kUnpack>
__device__ void move(const PackArguments& a) {
  const PackPart part = a.part[blockIdx.y];
  const std::uint32_t total = part.pages * a.kinds * part.layers * a.piece_vectors;
  const std::uint32_t threads = gridDim.x * blockDim.x;
  for (std::uint32_t first = blockIdx.x * blockDim.x + threadIdx.x; first < total; first += kUnroll * threads) {
    Vector value[kUnroll];
    Vector* to[kUnroll];
#pragma unroll
    for (std::uint32_t i = 0; i < kUnroll; ++i) {
      const std::uint32_t v = first + i * threads;
      if (v >= total) continue;
      const Place<Vector> place(a, part, v);
      value[i] = *(kUnpack ? place.slot : place.tensor);
      to[i] = kUnpack ? place.tensor : place.slot;
    }
#pragma unroll
    for (std::uint32_t i = 0; i < kUnroll; ++i) {
      if (first + i * threads < total) *to[i] = value[i];
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kPackThreads) hicache_pack_16(const __grid_constant__ PackArguments a) {
  move<uint4, false>(a);
}
extern "C" __global__ void __launch_bounds__(kPackThreads) hicache_pack_8(const __grid_constant__ PackArguments a) {
  move<std::uint64_t, false>(a);
}
extern "C" __global__ void __launch_bounds__(kPackThreads) hicache_unpack_16(const __grid_constant__ PackArguments a) {
  move<uint4, true>(a);
}
extern "C" __global__ void __launch_bounds__(kPackThreads) hicache_unpack_8(const __grid_constant__ PackArguments a) {
  move<std::uint64_t, true>(a);
}
