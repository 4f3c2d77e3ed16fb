// The rings: full and empty, wrapping counters, peers that lie, and a stream between two threads.
#include "shm/ring.hpp"

#include <memory>
#include <thread>

#include "tests/support/catch.hpp"

namespace hicache {

namespace {

struct Item {
  std::uint64_t words[7];
};

Item item(std::uint64_t n) {
  Item i{};
  for (std::uint64_t w = 0; w < 7; ++w) i.words[w] = n * 7 + w;
  return i;
}

bool is_item(const Item& i, std::uint64_t n) {
  for (std::uint64_t w = 0; w < 7; ++w) {
    if (i.words[w] != n * 7 + w) return false;
  }
  return true;
}

// A ring in private memory whose counters stand at `start`, as after that many entries.
struct Ring {
  explicit Ring(std::uint32_t entries, std::uint32_t start = 0)
      : size(entries), slots(std::make_unique<RingEntry[]>(entries)) {
    head.store(start, std::memory_order_relaxed);
    tail.store(start, std::memory_order_relaxed);
    if (start == 0) return;  // a new ring is all zero
    for (std::uint32_t n = start - size; n != start; ++n) {
      slots[n & (size - 1)].sequence.store(n + 1, std::memory_order_relaxed);
    }
  }
  RingProducer<Item> producer() { return {slots.get(), size, &head, &tail}; }
  RingConsumer<Item> consumer() { return {slots.get(), size, &head}; }

  std::uint32_t size;
  std::unique_ptr<RingEntry[]> slots;
  alignas(kCacheLine) A32 head{0};
  alignas(kCacheLine) A32 tail{0};
};

// Numbers around which a ring is tried: fresh, and just below the wrap of the counters.
constexpr std::uint32_t kStarts[] = {0, 0xffffffffu, 0xfffffffau, 0xfffffff8u, 0x7ffffffeu};

}  // namespace

TEST_CASE("A new ring is empty and takes as many entries as it has slots") {
  for (const std::uint32_t start : kStarts) {
    CAPTURE(start);
    Ring ring(8, start);
    auto producer = ring.producer();
    auto consumer = ring.consumer();
    CHECK_FALSE(consumer.ready());
    CHECK_FALSE(consumer.pop().has_value());
    CHECK(producer.space() == 8);
    for (std::uint64_t n = 0; n < 8; ++n) {
      REQUIRE(producer.has_space());
      producer.push(item(n));
    }
    CHECK_FALSE(producer.has_space());
    CHECK(producer.space() == 0);
    CHECK_FALSE(producer.broken());
    CHECK(ring.tail.load() == start + 8);
    const auto first = consumer.pop();
    REQUIRE(first.has_value());
    CHECK(is_item(*first, 0));
    CHECK(ring.head.load() == start + 1);
    CHECK(producer.has_space());
    CHECK(producer.space() == 1);
    for (std::uint64_t n = 1; n < 8; ++n) REQUIRE(is_item(consumer.pop().value(), n));
    CHECK_FALSE(consumer.pop().has_value());
    CHECK(producer.space() == 8);
  }
}

TEST_CASE("Entries come out in order over many laps and the wrap of the counters") {
  for (const std::uint32_t start : {0u, 0xffffff00u}) {
    Ring ring(4, start);
    auto producer = ring.producer();
    auto consumer = ring.consumer();
    std::uint64_t out = 0;
    for (std::uint64_t in = 0; in < 1000; ++in) {
      while (!producer.has_space()) REQUIRE(is_item(consumer.pop().value(), out++));
      producer.push(item(in));
      if (in % 3 == 0) REQUIRE(is_item(consumer.pop().value(), out++));
    }
    while (const auto last = consumer.pop()) REQUIRE(is_item(*last, out++));
    CHECK(out == 1000);
    CHECK(consumer.head() == start + 1000);
    CHECK(producer.tail() == start + 1000);
  }
}

TEST_CASE("A head that lies is reported as broken and gives no space") {
  const std::uint32_t start = GENERATE(0u, 0xfffffffeu);
  Ring ring(8, start);
  auto producer = ring.producer();
  producer.push(item(0));
  producer.push(item(1));
  SECTION("ahead of the tail") {
    ring.head.store(start + 3);
  }
  SECTION("far ahead of the tail") {
    ring.head.store(start + 0x80000000u);
  }
  SECTION("more than a ring behind") {
    ring.head.store(start + 2 - 9);
  }
  CHECK(producer.space() == 0);
  CHECK(producer.broken());
  CHECK_FALSE(producer.has_space());
  ring.head.store(start + 1);
  CHECK(producer.space() == 7);
  CHECK_FALSE(producer.broken());
}

TEST_CASE("A sequence that can't be the next one is not an entry") {
  Ring ring(8);
  auto consumer = ring.consumer();
  for (const std::uint32_t lie : {2u, 9u, 0xffffffffu, 0u}) {
    ring.slots[0].sequence.store(lie);
    CHECK_FALSE(consumer.ready());
    CHECK_FALSE(consumer.pop().has_value());
  }
  CHECK(ring.head.load() == 0);
}

TEST_CASE("A tail word that lies moves nothing") {
  Ring ring(8);
  auto producer = ring.producer();
  auto consumer = ring.consumer();
  ring.tail.store(5);
  CHECK_FALSE(consumer.pop().has_value());
  CHECK(producer.space() == 8);
}

TEST_CASE("What is written into a slot after it was popped does not change the copy") {
  Ring ring(2);
  auto producer = ring.producer();
  auto consumer = ring.consumer();
  producer.push(item(1));
  const auto copy = consumer.pop();
  for (auto& word : ring.slots[0].payload) word.store(99);
  REQUIRE(copy.has_value());
  CHECK(is_item(*copy, 1));
}

TEST_CASE("Two threads stream millions of entries through the ring without losing or tearing one") {
  // A ring that is hardly ever full, and one that is full or empty at every step.
  const std::uint32_t entries = GENERATE(256u, 2u);
  const std::uint64_t items = entries == 2 ? 300'000 : 3'000'000;
  // Starts so that the counters wrap in the middle of the stream.
  Ring ring(entries, 0u - static_cast<std::uint32_t>(items / 2));
  std::thread sender([producer = ring.producer(), items]() mutable {
    for (std::uint64_t n = 0; n < items; ++n) {
      while (!producer.has_space()) std::this_thread::yield();
      producer.push(item(n));
    }
  });
  auto consumer = ring.consumer();
  std::uint64_t wrong = 0;
  for (std::uint64_t n = 0; n < items;) {
    const auto next = consumer.pop();
    if (!next) {
      std::this_thread::yield();
      continue;
    }
    wrong += is_item(*next, n) ? 0 : 1;
    ++n;
  }
  sender.join();
  CHECK(wrong == 0);
  CHECK_FALSE(consumer.ready());
}

}  // namespace hicache
