// AC-24, AC-25: the FIFO free list of token slots, and what it refuses.
#include "hicache/token_slots.hpp"

#include <numeric>
#include <random>

#include "tests/support/catch.hpp"

namespace hicache {

namespace {

using Slots = std::vector<std::uint64_t>;

std::unique_ptr<TokenSlots> pool(std::uint64_t slots, std::uint32_t page) {
  auto made = TokenSlots::create(slots, page);
  REQUIRE(made.ok());
  return std::move(made.value());
}

}  // namespace

TEST_CASE("AC-24 and AC-25 FIFO free list and double free") {
  auto slots = pool(12, 4);
  const Slots a = slots->alloc(4).value();
  const Slots b = slots->alloc(4).value();
  CHECK(a == Slots{0, 1, 2, 3});
  CHECK(b == Slots{4, 5, 6, 7});
  CHECK(slots->free(a).ok());
  CHECK(slots->free_list() == Slots{8, 9, 10, 11, 0, 1, 2, 3});
  CHECK(slots->alloc(8).value() == Slots{8, 9, 10, 11, 0, 1, 2, 3});
  CHECK(slots->alloc(4).status() == Status::no_space);
  CHECK(slots->available() == 0);
  CHECK(slots->free(b).ok());
  CHECK(slots->free_list() == Slots{4, 5, 6, 7});
  const auto odd = slots->alloc(3);
  REQUIRE(odd.status() == Status::invalid_argument);
  CHECK(odd.error().message.find("The requested size should be a multiple of the page size.") == 0);
  CHECK(slots->free_list() == Slots{4, 5, 6, 7});

  CHECK(slots->free(b).status() == Status::already_released);
  CHECK(slots->free_list() == Slots{4, 5, 6, 7});
  CHECK(slots->alloc(4).value() == Slots{4, 5, 6, 7});
  CHECK(slots->alloc(4).status() == Status::no_space);
}

TEST_CASE("A request for more slots than are free takes none") {
  auto slots = pool(8, 4);
  REQUIRE(slots->alloc(4).ok());
  CHECK(slots->alloc(8).status() == Status::no_space);
  CHECK(slots->available() == 4);
  CHECK(slots->alloc(0).value().empty());
  CHECK(slots->alloc(std::uint64_t{1} << 63).status() == Status::no_space);
}

TEST_CASE("A refused release frees nothing of its list") {
  auto slots = pool(16, 4);
  const Slots all = slots->alloc(16).value();
  REQUIRE(slots->free(Slots{4, 5, 6, 7}).ok());
  const Slots before = slots->free_list();
  SECTION("one page of it is free already") {
    CHECK(slots->free(Slots{0, 1, 2, 3, 4, 5, 6, 7}).status() == Status::already_released);
  }
  SECTION("a page is named twice") {
    CHECK(slots->free(Slots{8, 9, 10, 11, 8, 9, 10, 11}).status() == Status::already_released);
  }
  SECTION("not whole pages") {
    CHECK(slots->free(Slots{0, 1, 2}).status() == Status::invalid_argument);
  }
  SECTION("a page out of order") {
    CHECK(slots->free(Slots{0, 2, 1, 3}).status() == Status::invalid_argument);
  }
  SECTION("across two pages") {
    CHECK(slots->free(Slots{2, 3, 4, 5}).status() == Status::invalid_argument);
  }
  SECTION("outside the pool") {
    CHECK(slots->free(Slots{16, 17, 18, 19}).status() == Status::invalid_argument);
  }
  SECTION("far outside the pool") {
    CHECK(slots->free(Slots{~3ull, ~2ull, ~1ull, ~0ull}).status() == Status::invalid_argument);
  }
  CHECK(slots->free_list() == before);
  REQUIRE(slots->free(Slots{0, 1, 2, 3, 8, 9, 10, 11}).ok());
  CHECK(slots->available() == 12);
}

TEST_CASE("clear makes the free list ascending again") {
  auto slots = pool(12, 4);
  const Slots a = slots->alloc(8).value();
  REQUIRE(slots->free(Slots{4, 5, 6, 7}).ok());
  slots->clear();
  Slots ascending(12);
  std::iota(ascending.begin(), ascending.end(), 0);
  CHECK(slots->free_list() == ascending);
  CHECK(slots->free(a).status() == Status::already_released);
}

TEST_CASE("A pool that does not consist of pages is refused") {
  CHECK(TokenSlots::create(10, 4).status() == Status::invalid_argument);
  CHECK(TokenSlots::create(0, 4).status() == Status::invalid_argument);
  CHECK(TokenSlots::create(8, 0).status() == Status::invalid_argument);
}

TEST_CASE("Random allocations and releases follow a queue and never hand a slot out twice") {
  const std::uint32_t seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937 random(seed);
  constexpr std::uint64_t kPages = 32;
  auto slots = pool(kPages * 2, 2);
  std::vector<std::uint64_t> queue(kPages);
  std::iota(queue.begin(), queue.end(), 0);
  std::vector<Slots> held;
  for (int step = 0; step < 20000; ++step) {
    if (random() % 2 == 0) {
      const std::uint64_t pages = random() % 6;
      const auto got = slots->alloc(pages * 2);
      REQUIRE(got.ok() == (pages <= queue.size()));
      if (!got.ok()) continue;
      Slots expected;
      for (std::uint64_t i = 0; i < pages; ++i) {
        expected.push_back(queue[i] * 2);
        expected.push_back(queue[i] * 2 + 1);
      }
      queue.erase(queue.begin(), queue.begin() + static_cast<std::ptrdiff_t>(pages));
      REQUIRE(*got == expected);
      if (pages > 0) held.push_back(*got);
    } else if (!held.empty()) {
      const std::size_t which = random() % held.size();
      REQUIRE(slots->free(held[which]).ok());
      for (std::size_t i = 0; i < held[which].size(); i += 2) queue.push_back(held[which][i] / 2);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(which));
    }
    REQUIRE(slots->available() == queue.size() * 2);
  }
}

}  // namespace hicache
