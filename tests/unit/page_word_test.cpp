// The page word: its bits and its life.
#include "shm/page_word.hpp"

#include <set>
#include <utility>

#include "tests/support/catch.hpp"

namespace hicache {

TEST_CASE("Page states change only along the arrows") {
  using enum PageState;
  const std::set<std::pair<PageState, PageState>> arrows = {
      {free, reserved},    {reserved, filling}, {reserved, aborting}, {filling, ready},
      {filling, aborting}, {ready, evicting},   {evicting, free},     {aborting, free}};
  for (std::uint8_t from = 0; from < kPageStateCount; ++from) {
    for (std::uint8_t to = 0; to < kPageStateCount; ++to) {
      const auto a = static_cast<PageState>(from);
      const auto b = static_cast<PageState>(to);
      CAPTURE(to_string(a), to_string(b));
      CHECK(is_page_transition(a, b) == arrows.contains({a, b}));
    }
  }
}

TEST_CASE("A state outside the table has no arrows and no name") {
  for (std::uint8_t s = kPageStateCount; s < 16; ++s) {
    CHECK(to_string(static_cast<PageState>(s)) == "invalid");
    for (std::uint8_t t = 0; t < 16; ++t) {
      CHECK_FALSE(is_page_transition(static_cast<PageState>(s), static_cast<PageState>(t)));
      CHECK_FALSE(is_page_transition(static_cast<PageState>(t), static_cast<PageState>(s)));
    }
  }
}

TEST_CASE("An aborted page never passes through ready") {
  CHECK_FALSE(is_page_transition(PageState::aborting, PageState::ready));
  CHECK_FALSE(is_page_transition(PageState::ready, PageState::aborting));
}

TEST_CASE("Page words survive encoding at the ends of their ranges") {
  for (const PageState state : {PageState::free, PageState::ready, PageState::aborting}) {
    for (const std::uint8_t flags : {std::uint8_t{0}, PageWord::kDirty}) {
      for (const std::uint32_t pins : {0u, 1u, PageWord::kMaxPins}) {
        for (const std::uint32_t generation : {0u, 1u, 0xffffffffu}) {
          const PageWord word{state, flags, pins, Generation{generation}};
          CHECK(PageWord::decode(word.encode()) == word);
        }
      }
    }
  }
}

TEST_CASE("The bits of a page word lie where the layout says") {
  CHECK(PageWord{PageState::ready, PageWord::kDirty, 2, Generation{3}}.encode() == 0x0000000300000213ull);
  CHECK(PageWord{}.encode() == 0);  // a zeroed page table is a table of free pages
}

TEST_CASE("Decoding and encoding keep every one of the 64 bits") {
  for (int bit = 0; bit < 64; ++bit) CHECK(PageWord::decode(1ull << bit).encode() == 1ull << bit);
}

TEST_CASE("Only ready pages are readable") {
  for (std::uint8_t s = 0; s < 16; ++s) {
    PageWord word;
    word.state = static_cast<PageState>(s);
    CHECK(word.readable() == (word.state == PageState::ready));
  }
}

}  // namespace hicache
