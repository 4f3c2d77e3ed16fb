// What a benchmark page holds: every 8-byte word is a function of the namespace, the page's key, the shard,
// the layer, K or V, and the word's offset. A byte that comes from another page, shard, layer or offset is
// therefore seen.
#pragma once

#include <cstdint>
#include <span>

#include "shm/device_geometry.hpp"
#include "shm/types.hpp"
#include "tools/bench/pattern_math.hpp"

namespace hicache::bench {

// Base of one piece (one layer, K or V, of one shard of one page).
struct PieceIdentity {
  PrefixHash namespace_digest;
  PrefixHash key;
  std::uint32_t shard = 0;
  std::uint32_t layer = 0;
  TensorKind kind = TensorKind::k;
};
std::uint64_t piece_base(const PieceIdentity& piece);

// All three take whole words: the size must be a multiple of 8.
void fill_piece(std::span<std::uint8_t> piece, std::uint64_t base);
std::uint64_t count_wrong_words(std::span<const std::uint8_t> piece, std::uint64_t base);
// Bytes that no piece holds in a row, so that a load that never happened is seen.
void poison(std::span<std::uint8_t> bytes);

}  // namespace hicache::bench
