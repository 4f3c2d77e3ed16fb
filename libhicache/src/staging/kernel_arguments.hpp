// What the host hands to the kernels that pack and unpack pages.
#pragma once

#include <cstdint>

namespace hicache {

// Kernel parameters have 4 KiB: slots and pages of one launch.
constexpr std::uint32_t kPackSlots = 8;
constexpr std::uint32_t kPackPages = 896;
constexpr std::uint32_t kPackThreads = 512;  // of a block

// A tensor in device memory, K of every layer first, then V.
struct PackTensor {
  std::uint64_t address;
  std::uint64_t page_stride;  // bytes
};

// A slot, and what it holds.
struct PackPart {
  std::uint32_t slot;
  std::uint32_t first_layer;
  std::uint32_t layers;
  std::uint32_t first_page;  // in PackArguments::page
  std::uint32_t pages;
};

// Grid: blocks of a slot by slots.
struct PackArguments {
  std::uint64_t memory;  // device address of slot 0
  std::uint64_t slot_bytes;
  std::uint64_t tensors;  // device address of PackTensor[kinds * layers]
  std::uint32_t layers;   // of the namespace
  std::uint32_t kinds;
  std::uint32_t piece_vectors;  // a piece in units of the kernel's vector
  PackPart part[kPackSlots];
  std::uint32_t page[kPackPages];
};
static_assert(sizeof(PackArguments) <= 4096);

}  // namespace hicache
