// The waiting ladder and the park handshake: nobody sleeps through published work.
#include "shm/waiting.hpp"

#include <cerrno>
#include <chrono>
#include <thread>
#include <vector>

#include "shm/futex.hpp"
#include "shm/types.hpp"
#include "tests/support/catch.hpp"

namespace hicache {

namespace {

constexpr std::uint64_t kParkNs = 10'000'000'000;

// One direction of a ping-pong: a value that grows, and its reader's sleep words.
struct alignas(kCacheLine) Side {
  std::atomic<std::uint32_t> value{0};
  std::atomic<std::uint32_t> sleeping{0};
  std::atomic<std::uint32_t> wake{0};
};

void publish(Side& side, std::uint32_t value) {
  side.value.store(value, std::memory_order_release);
  park_fence();  // SYNC park
  if (side.sleeping.load(std::memory_order_relaxed) != 0) {
    side.wake.fetch_add(1, std::memory_order_relaxed);
    futex_wake_all(&side.wake);
  }
}

struct Sleeps {
  std::uint64_t parked = 0;
  std::uint64_t late = 0;  // time-outs that found work
};

void await(Side& side, std::uint32_t value, const WaitPolicy& policy, Sleeps& sleeps) {
  WaitLadder ladder(policy);
  const auto there = [&] { return timeline_reached(side.value.load(std::memory_order_acquire), value); };
  while (!there()) {
    if (ladder.step()) continue;
    const std::uint32_t seen = side.wake.load(std::memory_order_relaxed);
    side.sleeping.store(1, std::memory_order_relaxed);
    park_fence();  // SYNC park
    if (!there()) {
      ++sleeps.parked;
      if (futex_wait(&side.wake, seen, kParkNs) == ETIMEDOUT && there()) ++sleeps.late;
    }
    side.sleeping.store(0, std::memory_order_relaxed);
  }
}

void ping_pong(const WaitPolicy& policy, std::uint32_t rounds, Sleeps& left, Sleeps& right) {
  Side ping, pong;
  std::thread other([&] {
    for (std::uint32_t i = 1; i <= rounds; ++i) {
      await(ping, i, policy, right);
      publish(pong, i);
    }
  });
  for (std::uint32_t i = 1; i <= rounds; ++i) {
    publish(ping, i);
    await(pong, i, policy, left);
  }
  other.join();
}

}  // namespace

TEST_CASE("Two threads that only park never sleep through each other's work") {
  Sleeps left, right;
  ping_pong(WaitPolicy{.spin_us = 0, .yield_us = 0, .park_ms = 50}, 20000, left, right);
  CHECK(left.late == 0);
  CHECK(right.late == 0);
  CHECK(left.parked + right.parked > 0);
}

TEST_CASE("Two threads on the whole ladder never sleep through each other's work") {
  // Budgets so short that a partner that was descheduled is found at every rung.
  Sleeps left, right;
  ping_pong(WaitPolicy{.spin_us = 1, .yield_us = 2, .park_ms = 50}, 20000, left, right);
  CHECK(left.late == 0);
  CHECK(right.late == 0);
}

TEST_CASE("The park fence lets one of two threads see the other's store, always") {
  constexpr std::size_t kCells = 256;
  constexpr std::uint32_t kLaps = 4000;
  struct alignas(kCacheLine) Cell {
    std::atomic<std::uint32_t> word{0};
  };
  std::vector<Cell> left(kCells), right(kCells);
  std::vector<std::uint32_t> seen_left(kCells), seen_right(kCells);
  std::atomic<std::uint32_t> arrived{0};
  const auto meet = [&](std::uint32_t count) {
    arrived.fetch_add(1, std::memory_order_acq_rel);
    for (int look = 0; arrived.load(std::memory_order_acquire) < count; ++look) {
      if (look < 1000) {
        cpu_relax();
      } else {
        std::this_thread::yield();
      }
    }
  };
  // The threads run through the cells of a lap in opposite directions, so that their stores and loads cross.
  const auto step = [](std::uint32_t lap, std::atomic<std::uint32_t>& mine,
                       const std::atomic<std::uint32_t>& theirs) {
    mine.store(lap, std::memory_order_relaxed);
    park_fence();
    return theirs.load(std::memory_order_relaxed);
  };
  std::thread other([&] {
    for (std::uint32_t lap = 1; lap <= kLaps; ++lap) {
      meet(4 * lap - 2);
      for (std::size_t i = kCells; i-- > 0;) seen_right[i] = step(lap, right[i].word, left[i].word);
      meet(4 * lap);
    }
  });
  std::uint64_t neither = 0;
  for (std::uint32_t lap = 1; lap <= kLaps; ++lap) {
    meet(4 * lap - 2);
    for (std::size_t i = 0; i < kCells; ++i) seen_left[i] = step(lap, left[i].word, right[i].word);
    meet(4 * lap);
    for (std::size_t i = 0; i < kCells; ++i) neither += seen_left[i] < lap && seen_right[i] < lap ? 1 : 0;
  }
  other.join();
  CHECK(neither == 0);
}

TEST_CASE("A ladder without budgets parks at once, again and again") {
  WaitLadder ladder(WaitPolicy{.spin_us = 0, .yield_us = 0, .park_ms = 50});
  for (int i = 0; i < 3; ++i) CHECK_FALSE(ladder.step());
}

TEST_CASE("A ladder steps for its budget, then parks, then starts over") {
  WaitLadder ladder(WaitPolicy{.spin_us = 500, .yield_us = 500, .park_ms = 50});
  for (int turn = 0; turn < 2; ++turn) {
    const std::uint64_t start = monotonic_ns();
    std::uint64_t steps = 0;
    while (ladder.step()) ++steps;
    CHECK(steps > 0);
    CHECK(monotonic_ns() - start >= 1'000'000);
  }
}

TEST_CASE("A reset ladder has its whole budget again") {
  WaitLadder ladder(WaitPolicy{.spin_us = 0, .yield_us = 1000, .park_ms = 50});
  REQUIRE(ladder.step());
  std::this_thread::sleep_for(std::chrono::milliseconds(3));
  ladder.reset();
  const std::uint64_t start = monotonic_ns();
  while (ladder.step()) {
  }
  CHECK(monotonic_ns() - start >= 1'000'000);
}

TEST_CASE("futex_wait returns at once when the word has changed and times out when it has not") {
  std::atomic<std::uint32_t> word{1};
  CHECK(futex_wait(&word, 0, kParkNs) == EAGAIN);
  CHECK(futex_wait(&word, 1, 1'000'000) == ETIMEDOUT);
}

}  // namespace hicache
