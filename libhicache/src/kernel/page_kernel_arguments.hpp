// What the host hands to the kernels that gather and scatter pages.
#pragma once

#include <cstdint>

namespace hicache {

constexpr std::uint32_t kMoveWarps = 32;  // of a block, as in the seed system
constexpr std::uint32_t kMoveThreads = 32 * kMoveWarps;

// A tensor in device memory.
struct MoveTensor {
  std::uint64_t address;       // of page or state slot 0
  std::uint64_t page_stride;   // bytes
  std::uint64_t shard_offset;  // where its piece begins in a shard
};

// A page of a request.
struct MovePage {
  std::uint64_t shard;  // device address of the rank's shard in the pool
  std::uint32_t page;   // device page
  std::uint32_t state;  // state slot, all ones = its states are not moved
};

// Item i is row i % rows of page i / rows % pages of tensor i / rows / pages.
struct MoveArguments {
  std::uint64_t tensors;  // device address of MoveTensor[], the launch's first one
  std::uint64_t pages;    // device address of MovePage[]
  std::uint32_t page_count;
  std::uint32_t rows;  // of a piece
  std::uint32_t row_bytes;
  std::uint32_t items;
  std::uint32_t items_per_warp;
  std::uint32_t states;  // 1 = pieces are states
};

}  // namespace hicache
