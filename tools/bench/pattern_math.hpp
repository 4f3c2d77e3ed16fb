// The arithmetic of the page pattern, for CPUs and, in kernels, for GPUs: the two must agree to the bit.
#pragma once

#include <cstdint>

namespace hicache::bench {

// Word `index` of the piece with this base.
constexpr std::uint64_t pattern_word(std::uint64_t base, std::uint64_t index) {
  // An odd multiplier makes all words of a piece differ; the shift spreads the base's high bits over the
  // word.
  const std::uint64_t x = base + index * 0x9e3779b97f4a7c15ull;
  return x ^ (x >> 31);
}

constexpr std::uint64_t pattern_mix(std::uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// Base of a piece: digest and key are four words each.
constexpr std::uint64_t pattern_base(const std::uint64_t* digest, const std::uint64_t* key,
                                     std::uint32_t shard, std::uint32_t layer, std::uint32_t kind) {
  std::uint64_t x = 0x243f6a8885a308d3ull;
  for (int i = 0; i < 4; ++i) x = pattern_mix(x ^ digest[i]);
  for (int i = 0; i < 4; ++i) x = pattern_mix(x ^ key[i]);
  x = pattern_mix(x ^ ((std::uint64_t{shard} << 32) | layer));
  return pattern_mix(x ^ kind);
}

}  // namespace hicache::bench
