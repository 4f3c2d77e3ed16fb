// What the host hands to the benchmark's kernels.
#pragma once

#include <cstdint>

namespace hicache::bench {

struct PatternNamespace {
  std::uint64_t digest[4];
  std::uint32_t shard;
  std::uint32_t reserved;
};

struct PatternPage {
  std::uint64_t key[4];
  std::uint64_t page;  // device page
};

struct PatternTensor {
  std::uint64_t address;
  std::uint64_t page_stride;
  std::uint32_t words;  // 8-byte words of a page's piece
  std::uint32_t layer;
  std::uint32_t kind;
  std::uint32_t reserved;
};

struct PatternFindings {
  std::uint64_t wrong_words;
  std::uint64_t poison_words;  // of them, words that still hold what hicache_poison left
  std::uint64_t first_wrong;   // page << 32 | tensor of some wrong piece; ~0 = none
};

}  // namespace hicache::bench
