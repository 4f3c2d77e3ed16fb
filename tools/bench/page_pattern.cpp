#include "tools/bench/page_pattern.hpp"

#include <array>
#include <cassert>
#include <cstring>

namespace hicache::bench {
namespace {

// Words are handled eight at a time, so that compilers make vector code of additions, shifts and xors.
constexpr std::size_t kLanes = 8;
constexpr std::size_t kBlockBytes = kLanes * sizeof(std::uint64_t);
constexpr std::uint64_t kBlockStep = kLanes * 0x9e3779b97f4a7c15ull;
using Block = std::array<std::uint64_t, kLanes>;

Block first_block(std::uint64_t base) {
  Block x;
  for (std::size_t lane = 0; lane < kLanes; ++lane) x[lane] = base + lane * 0x9e3779b97f4a7c15ull;
  return x;
}

}  // namespace

std::uint64_t piece_base(const PieceIdentity& piece) {
  return pattern_base(piece.namespace_digest.words.data(), piece.key.words.data(), piece.shard, piece.layer,
                      static_cast<std::uint32_t>(piece.kind));
}

void fill_piece(std::span<std::uint8_t> piece, std::uint64_t base) {
  assert(piece.size() % sizeof(std::uint64_t) == 0);
  Block x = first_block(base);
  std::size_t at = 0;
  for (; at + kBlockBytes <= piece.size(); at += kBlockBytes) {
    Block out;
    for (std::size_t lane = 0; lane < kLanes; ++lane) out[lane] = x[lane] ^ (x[lane] >> 31);
    for (std::size_t lane = 0; lane < kLanes; ++lane) x[lane] += kBlockStep;
    std::memcpy(piece.data() + at, out.data(), kBlockBytes);
  }
  for (; at < piece.size(); at += sizeof(std::uint64_t)) {
    const std::uint64_t word = pattern_word(base, at / sizeof(std::uint64_t));
    std::memcpy(piece.data() + at, &word, sizeof word);
  }
}

std::uint64_t count_wrong_words(std::span<const std::uint8_t> piece, std::uint64_t base) {
  assert(piece.size() % sizeof(std::uint64_t) == 0);
  Block x = first_block(base);
  // Differences are gathered first: pieces are right nearly always, and then nothing has to be counted.
  Block difference{};
  std::size_t at = 0;
  for (; at + kBlockBytes <= piece.size(); at += kBlockBytes) {
    Block in;
    std::memcpy(in.data(), piece.data() + at, kBlockBytes);
    for (std::size_t lane = 0; lane < kLanes; ++lane)
      difference[lane] |= in[lane] ^ x[lane] ^ (x[lane] >> 31);
    for (std::size_t lane = 0; lane < kLanes; ++lane) x[lane] += kBlockStep;
  }
  std::uint64_t any = 0;
  for (const std::uint64_t d : difference) any |= d;
  if (any == 0 && at == piece.size()) return 0;

  std::uint64_t wrong = 0;
  for (std::size_t i = 0; i < piece.size() / sizeof(std::uint64_t); ++i) {
    std::uint64_t word = 0;
    std::memcpy(&word, piece.data() + i * sizeof word, sizeof word);
    if (word != pattern_word(base, i)) ++wrong;
  }
  return wrong;
}

void poison(std::span<std::uint8_t> bytes) {
  std::memset(bytes.data(), 0xa5, bytes.size());
}

}  // namespace hicache::bench
