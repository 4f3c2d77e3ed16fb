#include "libhicache/src/arena.hpp"

#include <algorithm>
#include <random>
#include <vector>

#include "tests/support/catch.hpp"

using hicache::Arena;

TEST_CASE("pieces of an arena are aligned, inside it, and never overlap, through a long random life") {
  Arena arena(64 * 1024);
  struct Piece {
    std::uint32_t offset;
    std::uint32_t bytes;
  };
  std::vector<Piece> pieces;
  std::mt19937 random(7);
  std::uint32_t refused = 0;
  for (int step = 0; step < 20'000; ++step) {
    if (random() % 3 != 0 || pieces.empty()) {
      const auto bytes = static_cast<std::uint32_t>(1 + random() % 3000);
      const auto offset = arena.allocate(bytes);
      if (!offset) {
        ++refused;
        REQUIRE(arena.release(pieces.back().offset, pieces.back().bytes));
        pieces.pop_back();
        continue;
      }
      REQUIRE(*offset % Arena::kAlignment == 0);
      REQUIRE(*offset + bytes <= arena.size());
      const bool overlaps = std::any_of(pieces.begin(), pieces.end(), [&](const Piece& p) {
        return *offset < p.offset + p.bytes && p.offset < *offset + bytes;
      });
      REQUIRE_FALSE(overlaps);
      pieces.push_back({*offset, bytes});
    } else {
      const std::size_t i = random() % pieces.size();
      REQUIRE(arena.release(pieces[i].offset, pieces[i].bytes));
      pieces[i] = pieces.back();
      pieces.pop_back();
    }
  }
  REQUIRE(refused > 0);
  for (const Piece& piece : pieces) REQUIRE(arena.release(piece.offset, piece.bytes));
  REQUIRE(arena.free_bytes() == arena.size());
  REQUIRE(arena.free_ranges() == 1);
}

TEST_CASE("released neighbours grow together, so that the whole arena can be taken again") {
  Arena arena(4096);
  std::vector<std::uint32_t> offsets;
  while (const auto offset = arena.allocate(256)) offsets.push_back(*offset);
  REQUIRE(offsets.size() == 16);
  for (std::size_t i = 0; i < offsets.size(); i += 2) REQUIRE(arena.release(offsets[i], 256));
  REQUIRE(arena.free_ranges() == 8);
  REQUIRE_FALSE(arena.allocate(257).has_value());
  for (std::size_t i = 1; i < offsets.size(); i += 2) REQUIRE(arena.release(offsets[i], 256));
  REQUIRE(arena.allocate(4096) == 0u);
}

TEST_CASE("a piece of an arena can't be released twice, in part, or outside") {
  Arena arena(1024);
  REQUIRE(arena.allocate(100) == 0u);
  REQUIRE(arena.allocate(100) == 104u);
  REQUIRE(arena.release(0, 100));
  REQUIRE_FALSE(arena.release(0, 100));
  REQUIRE_FALSE(arena.release(96, 16));
  REQUIRE_FALSE(arena.release(104, 200));
  REQUIRE_FALSE(arena.release(1020, 8));
  REQUIRE_FALSE(arena.release(3, 8));
  REQUIRE_FALSE(arena.release(0, 0));
  REQUIRE(arena.release(104, 100));
  REQUIRE(arena.free_bytes() == 1024);
}

TEST_CASE("an arena refuses what never fits and what has no size") {
  Arena arena(1000);
  REQUIRE(arena.size() == 1000);
  REQUIRE_FALSE(arena.allocate(0).has_value());
  REQUIRE_FALSE(arena.allocate(1001).has_value());
  REQUIRE(arena.allocate(1000) == 0u);
  REQUIRE_FALSE(arena.allocate(1).has_value());
  REQUIRE_FALSE(Arena(0).allocate(1).has_value());
}
