// The transfer engine with real threads over the host backend.
#include "daemon/transfer/transfer_engine.hpp"

#include <algorithm>
#include <atomic>
#include <random>
#include <string>
#include <thread>

#include "shm/futex.hpp"
#include "tests/unit/transfer_rig.hpp"

namespace hicache::daemon {
namespace {

constexpr auto kWrite = Direction::write;
constexpr auto kLoad = Direction::load;

void sleep_ms(int ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

// A host thread of the engine's owner, waiting for a layer as the client library does.
bool wait_layer(LayerFences& fences, std::uint32_t layer, std::uint32_t value) {
  const std::uint64_t deadline = monotonic_ns() + 60'000'000'000ull;
  while (!timeline_reached(fences.layer[layer].load(std::memory_order_acquire), value)) {
    if (monotonic_ns() > deadline) return false;
    const std::uint32_t key = fences.wake.load(std::memory_order_acquire);
    fences.waiters.fetch_add(1);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!timeline_reached(fences.layer[layer].load(std::memory_order_acquire), value)) {
      futex_wait(&fences.wake, key, 100'000'000);
    }
    fences.waiters.fetch_sub(1);
  }
  return true;
}

}  // namespace

TEST_CASE("pages written to the pool and loaded back to other device pages are the same bytes") {
  const auto attention = GENERATE(Attention::mha, Attention::mla);
  const bool separate = GENERATE(false, true);
  TransferRig rig;
  const TestRank rank(3, {attention, 5, 1000, 64, separate});
  for (std::uint32_t i = 0; i < 20; ++i) rank.fill(i, 100 + i);
  const auto written = page_pairs(rank, 20, 0, 10);
  rig.engine->submit(make_transfer(1, rank, kWrite, written));
  const auto write_done = rig.results.wait(1);
  REQUIRE(write_done.status == Status::ok);
  REQUIRE(write_done.bytes == 20 * rank.shard_bytes());
  for (std::uint32_t i = 0; i < 20; ++i) REQUIRE(rank.host_holds(&rig.pool[written[i].host.value], 100 + i));

  for (std::uint32_t i = 30; i < 51; ++i) rank.poison(i);
  rig.engine->submit(make_transfer(2, rank, kLoad, page_pairs(rank, 20, 30, 10)));
  const auto load_done = rig.results.wait(2);
  REQUIRE(load_done.status == Status::ok);
  REQUIRE(load_done.bytes == 20 * rank.shard_bytes());
  for (std::uint32_t i = 0; i < 20; ++i) REQUIRE(rank.holds(30 + i, 100 + i));
  REQUIRE_FALSE(rank.holds(50, 120));  // the page after them is untouched
}

TEST_CASE("a transfer of more pages than are planned at once is complete") {
  TransferRig rig(1, 8 * kMiB);
  const TestRank rank(0, {Attention::mha, 1, 64, 1000, false});
  for (std::uint32_t i = 0; i < 1000; ++i) rank.fill(i, i);
  rig.engine->submit(make_transfer(1, rank, kWrite, page_pairs(rank, 1000, 0, 0)));
  REQUIRE(rig.results.wait(1).bytes == 1000 * rank.shard_bytes());
  for (std::uint32_t i = 0; i < 1000; ++i) rank.poison(i);
  rig.engine->submit(make_transfer(2, rank, kLoad, page_pairs(rank, 1000, 0, 0)));
  REQUIRE(rig.results.wait(2).status == Status::ok);
  for (std::uint32_t i = 0; i < 1000; ++i) REQUIRE(rank.holds(i, i));
}

TEST_CASE("a write waits until its fence has reached its value") {
  TransferRig rig;
  const TestRank rank(0);
  rank.fill(0, 1);
  A32& word = rank.fences().write[63].value;
  word.store(6);
  rig.engine->submit(fenced(make_transfer(1, rank, kWrite, page_pairs(rank, 1, 0, 0)), 63, 7));
  sleep_ms(20);
  REQUIRE_FALSE(rig.results.has(1));
  REQUIRE_FALSE(rank.host_holds(rig.pool.data(), 1));
  rank.fill(0, 2);
  word.store(7, std::memory_order_release);
  REQUIRE(rig.results.wait(1).status == Status::ok);
  REQUIRE(rank.host_holds(rig.pool.data(), 2));
}

TEST_CASE("write fence values are compared cyclically") {
  TransferRig rig;
  const TestRank rank(0);
  rank.fences().write[0].value.store(3);  // past 0xfffffff0
  rig.engine->submit(fenced(make_transfer(1, rank, kWrite, page_pairs(rank, 1, 0, 0)), 0, 0xfffffff0u));
  REQUIRE(rig.results.wait(1).status == Status::ok);
}

TEST_CASE("a rank whose fence is never reached does not hold up another rank") {
  const auto threads = GENERATE(1u, 3u);
  TransferRig rig(threads);
  const TestRank stuck(0);
  const TestRank busy(1);
  for (std::uint64_t id = 1; id <= 50; ++id) {
    rig.engine->submit(fenced(
        make_transfer(id, stuck, kWrite, page_pairs(stuck, 1, 0, 100 + static_cast<std::uint32_t>(id))), 0,
        1));
  }
  for (std::uint64_t id = 100; id < 150; ++id) {
    A32& word = busy.fences().write[5].value;
    rig.engine->submit(
        fenced(make_transfer(id, busy, kWrite, page_pairs(busy, 2, 0, 10)), 5, word.load() + 1));
    word.fetch_add(1);
    REQUIRE(rig.results.wait(id).status == Status::ok);
  }
  for (std::uint64_t id = 1; id <= 50; ++id) REQUIRE_FALSE(rig.results.has(id));
  stuck.fences().write[0].value.store(1);
  for (std::uint64_t id = 1; id <= 50; ++id) REQUIRE(rig.results.wait(id).status == Status::ok);
}

TEST_CASE("the deadline ends a write that waits for its fence") {
  TransferRig rig;
  const TestRank rank(0);
  auto t = fenced(make_transfer(1, rank, kWrite, page_pairs(rank, 1, 0, 0)), 0, 1);
  t.deadline_ns = monotonic_ns() + 5'000'000;
  rig.engine->submit(t);
  const auto done = rig.results.wait(1);
  REQUIRE(done.status == Status::timed_out);
  REQUIRE(done.bytes == 0);
  REQUIRE(monotonic_ns() >= t.deadline_ns);
}

TEST_CASE("cancel ends a waiting transfer and a queued one, and not a running one") {
  Gate gate;
  TransferRig rig(1, 8 * kMiB, [&](const RankMemory&, Direction, const CopyRun&) {
    gate.pass();
    return Status::ok;
  });
  const TestRank rank(0);
  rig.engine->submit(make_transfer(1, rank, kWrite, page_pairs(rank, 1, 0, 0)));
  gate.wait_for_caller();
  rig.engine->submit(fenced(make_transfer(2, rank, kWrite, page_pairs(rank, 1, 1, 1)), 0, 1));
  rig.engine->submit(fenced(make_transfer(3, rank, kLoad, page_pairs(rank, 1, 2, 2)), 0, 9));
  rig.engine->submit(make_transfer(4, rank, kLoad, page_pairs(rank, 1, 3, 3)));
  for (std::uint64_t id = 1; id <= 3; ++id) rig.engine->cancel(TransferId{id});
  rig.engine->cancel(TransferId{77});  // unknown: nothing happens
  gate.open();
  REQUIRE(rig.results.wait(1).status == Status::ok);
  REQUIRE(rig.results.wait(2).status == Status::timed_out);
  REQUIRE(rig.results.wait(3).status == Status::timed_out);
  REQUIRE(rig.results.wait(4).status == Status::ok);
  REQUIRE(rank.layers(0).failed.load() == 9);
}

TEST_CASE("cancel reaches a transfer whose thread sleeps") {
  TransferRig rig(2);
  const TestRank rank(0);
  rig.engine->submit(fenced(make_transfer(1, rank, kWrite, page_pairs(rank, 1, 0, 0)), 0, 1));
  sleep_ms(5);
  rig.engine->cancel(TransferId{1});
  REQUIRE(rig.results.wait(1).status == Status::timed_out);
}

TEST_CASE("cancel_client ends every waiting transfer of that client and generation only") {
  TransferRig rig;
  const TestRank gone(4);
  const TestRank other(5);
  const TestRank newer(4);
  newer.memory()->client_generation = Generation{2};
  for (std::uint64_t id = 1; id <= 3; ++id) {
    rig.engine->submit(fenced(make_transfer(id, gone, kWrite, page_pairs(gone, 1, 0, 0)), 1, 1));
  }
  rig.engine->submit(fenced(make_transfer(4, other, kWrite, page_pairs(other, 1, 0, 0)), 1, 1));
  rig.engine->submit(fenced(make_transfer(5, newer, kWrite, page_pairs(newer, 1, 0, 0)), 1, 1));
  rig.engine->cancel_client(ClientSlot{4}, Generation{1});
  for (std::uint64_t id = 1; id <= 3; ++id) REQUIRE(rig.results.wait(id).status == Status::peer_lost);
  REQUIRE_FALSE(rig.results.has(4));
  REQUIRE_FALSE(rig.results.has(5));
  other.fences().write[1].value.store(1);
  newer.fences().write[1].value.store(1);
  REQUIRE(rig.results.wait(4).status == Status::ok);
  REQUIRE(rig.results.wait(5).status == Status::ok);
}

TEST_CASE("the layers of a load become ready in order, each after its bytes") {
  const std::uint32_t layers = 6;
  std::vector<std::uint32_t> copied(layers);
  std::vector<std::string> faults;
  TransferRig rig(1, 8 * kMiB, [&](const RankMemory& m, Direction, const CopyRun& run) {
    // Before a run of layer l: all layers below l are announced, l and those above are not.
    for (std::uint32_t l = 0; l < layers; ++l) {
      const bool ready = m.fences->load[2].layer[l].load() == 42;
      if (ready != (l < run.first_layer)) faults.push_back("layer " + std::to_string(l));
    }
    ++copied[run.first_layer];
    return Status::ok;
  });
  const TestRank rank(0, {Attention::mha, layers, 512, 64, true});
  rig.engine->submit(fenced(make_transfer(1, rank, kLoad, page_pairs(rank, 8, 0, 0)), 2, 42));
  REQUIRE(rig.results.wait(1).status == Status::ok);
  REQUIRE(faults.empty());
  for (std::uint32_t l = 0; l < layers; ++l) {
    REQUIRE(copied[l] == 2);  // K and V, 8 consecutive pages each
    REQUIRE(rank.layers(2).layer[l].load() == 42);
  }
  REQUIRE(rank.layers(2).layer[layers].load() == 0);
  REQUIRE(rank.layers(2).failed.load() == 0);
}

TEST_CASE("a thread asleep on a layer is woken when it is ready") {
  Gate gate;
  TransferRig rig(1, 8 * kMiB, [&](const RankMemory&, Direction, const CopyRun&) {
    gate.pass();
    return Status::ok;
  });
  const TestRank rank(0);
  LayerFences& fences = rank.layers(1);
  rig.engine->submit(fenced(make_transfer(1, rank, kLoad, page_pairs(rank, 4, 0, 0)), 1, 5));
  std::atomic<bool> woken{false};
  std::thread waiter([&] { woken = wait_layer(fences, 3, 5); });
  while (fences.waiters.load() == 0) std::this_thread::yield();
  gate.open();
  waiter.join();
  REQUIRE(woken.load());
  REQUIRE(fences.wake.load() > 0);
  REQUIRE(rig.results.wait(1).status == Status::ok);
}

TEST_CASE("a load without pages announces all its layers at once") {
  TransferRig rig;
  const TestRank rank(0);
  rig.engine->submit(fenced(make_transfer(1, rank, kLoad, {}), 0, 11));
  REQUIRE(rig.results.wait(1).status == Status::ok);
  for (std::uint32_t l = 0; l < 4; ++l) REQUIRE(rank.layers(0).layer[l].load() == 11);
  REQUIRE(rank.layers(0).failed.load() == 0);
}

TEST_CASE("a load that fails on the way releases all its waits as failed") {
  TransferRig rig(1, 8 * kMiB, [](const RankMemory&, Direction, const CopyRun& run) {
    return run.first_layer == 2 ? Status::system_error : Status::ok;
  });
  const TestRank rank(0);
  std::thread waiter([&] { wait_layer(rank.layers(1), 3, 8); });
  rig.engine->submit(fenced(make_transfer(1, rank, kLoad, page_pairs(rank, 4, 0, 0)), 1, 8));
  waiter.join();
  const auto done = rig.results.wait(1);
  REQUIRE(done.status == Status::system_error);
  REQUIRE(done.bytes == rank.shard_bytes() * 4 / 2);  // layers 0 and 1 of 4
  for (std::uint32_t l = 0; l < 4; ++l) REQUIRE(rank.layers(1).layer[l].load() == 8);
  REQUIRE(rank.layers(1).failed.load() == 8);
}

TEST_CASE("a load whose deadline passes in the queue releases its waits as failed") {
  Gate gate;
  TransferRig rig(1, 8 * kMiB, [&](const RankMemory&, Direction, const CopyRun&) {
    gate.pass();
    return Status::ok;
  });
  const TestRank rank(0);
  rig.engine->submit(make_transfer(1, rank, kWrite, page_pairs(rank, 1, 0, 0)));
  gate.wait_for_caller();
  auto late = fenced(make_transfer(2, rank, kLoad, page_pairs(rank, 1, 1, 1)), 0, 3);
  late.deadline_ns = monotonic_ns() + 1'000'000;
  rig.engine->submit(late);
  sleep_ms(5);
  gate.open();
  REQUIRE(rig.results.wait(2).status == Status::timed_out);
  REQUIRE(rank.layers(0).failed.load() == 3);
  REQUIRE(rank.layers(0).layer[3].load() == 3);
}

TEST_CASE("the end of an old load never moves a layer word back") {
  TransferRig rig;
  const TestRank rank(0);
  rank.layers(0).layer[1].store(20);
  rig.engine->submit(fenced(make_transfer(1, rank, kLoad, page_pairs(rank, 1, 0, 0)), 0, 10));
  REQUIRE(rig.results.wait(1).status == Status::ok);
  REQUIRE(rank.layers(0).layer[0].load() == 10);
  REQUIRE(rank.layers(0).layer[1].load() == 20);
}

TEST_CASE(
    "fence numbers and device pages out of range are refused, pool offsets out of range never touched") {
  TransferRig rig;
  const TestRank rank(0);
  const auto pages = page_pairs(rank, 1, 0, 0);
  rig.engine->submit(fenced(make_transfer(1, rank, kWrite, pages), kWriteFences, 0));
  rig.engine->submit(fenced(make_transfer(2, rank, kLoad, pages), kProducerSlots, 0));
  rig.engine->submit(make_transfer(3, rank, kLoad, {{DevicePage{64}, PoolOffset{0}}}));
  rig.engine->submit(make_transfer(4, rank, kLoad, {{DevicePage::none(), PoolOffset{0}}}));
  auto homeless = make_transfer(5, rank, kLoad, pages);
  homeless.memory = nullptr;
  rig.engine->submit(homeless);
  for (std::uint64_t id = 1; id <= 5; ++id) REQUIRE(rig.results.wait(id).status == Status::invalid_argument);
  rig.engine->submit(make_transfer(6, rank, kWrite, {{DevicePage{0}, PoolOffset{8 * kMiB - 4096}}}));
  rig.engine->submit(make_transfer(7, rank, kWrite, {{DevicePage{0}, PoolOffset::none()}}));
  for (std::uint64_t id = 6; id <= 7; ++id) REQUIRE(rig.results.wait(id).status == Status::internal);
}

TEST_CASE("the host backend refuses every run that leaves its memory, and copies nothing of it") {
  std::vector<std::uint8_t> pool(64 * 1024);
  const auto backend = make_host_backend(pool.data(), pool.size());
  const TestRank rank(0, {Attention::mla, 1, 1024, 16, false});
  for (std::uint32_t i = 0; i < 16; ++i) rank.fill(i, 1 + i);
  const CopyRun good{0, 0, 0, 1024, 16, 1024, 4096, 0, 0};
  REQUIRE(backend->copy(*rank.memory(), kWrite, good) == Status::ok);
  REQUIRE(rank.host_holds(&pool[15 * 4096], 16));
  std::fill(pool.begin(), pool.end(), std::uint8_t{0});
  const std::uint64_t huge = ~0ull;
  const std::vector<CopyRun> bad = {
      {1, 0, 0, 1024, 1, 1024, 1024, 0, 0},           // no such allocation
      {0, 1, 0, 1024, 16, 1024, 4096, 0, 0},          // a byte past the device
      {0, 0, 3073, 1024, 16, 1024, 4096, 0, 0},       // a byte past the pool
      {0, huge, 0, 1024, 1, 1024, 1024, 0, 0},        // offsets and products that overflow
      {0, 0, huge - 100, 1024, 1, 1024, 1024, 0, 0},  //
      {0, 0, 0, 1024, 3, 1024, huge / 2 + 1, 0, 0},   //
      {0, 0, 0, 1024, huge, 1024, 1024, 0, 0},        //
      {0, 0, 0, huge, 1, huge, huge, 0, 0},           //
      {0, 0, 0, 0, 1, 0, 0, 0, 0},                    // nothing to copy: no plan has such runs
      {0, 0, 0, 1024, 0, 1024, 1024, 0, 0},           //
  };
  for (const auto& run : bad) {
    for (const auto direction : {kWrite, kLoad}) {
      REQUIRE(backend->copy(*rank.memory(), direction, run) == Status::internal);
    }
  }
  REQUIRE(std::all_of(pool.begin(), pool.end(), [](std::uint8_t b) { return b == 0; }));
}

TEST_CASE("clients take turns, and loads come before writes") {
  Gate gate;
  std::mutex mutex;
  std::vector<std::uint32_t> order;
  TransferRig rig(1, 8 * kMiB, [&](const RankMemory& m, Direction d, const CopyRun&) {
    gate.pass();
    const std::lock_guard lock(mutex);
    order.push_back(m.client.value * 10 + (d == kLoad ? 1 : 0));
    return Status::ok;
  });
  const RankShape shape{Attention::mla, 1, 1024, 64, false};  // one run a transfer
  const TestRank first(1, shape);
  const TestRank a(2, shape);
  const TestRank b(3, shape);
  rig.engine->submit(make_transfer(1, first, kWrite, page_pairs(first, 1, 0, 0)));
  gate.wait_for_caller();
  for (std::uint64_t id = 2; id <= 4; ++id)
    rig.engine->submit(make_transfer(id, a, kWrite, page_pairs(a, 1, 0, 0)));
  rig.engine->submit(make_transfer(5, b, kWrite, page_pairs(b, 1, 0, 0)));
  rig.engine->submit(make_transfer(6, b, kLoad, page_pairs(b, 1, 0, 0)));
  gate.open();
  for (std::uint64_t id = 1; id <= 6; ++id) REQUIRE(rig.results.wait(id).status == Status::ok);
  const std::lock_guard lock(mutex);
  REQUIRE(order == std::vector<std::uint32_t>{10, 31, 20, 30, 20, 20});
}

TEST_CASE("a long transfer gives way to another client's") {
  // The small transfer is submitted while the long one is in its first run; it must not come last.
  Gate gate;
  std::atomic<int> runs{0};
  std::atomic<int> runs_before_small{-1};
  const RankShape shape{Attention::mla, 1, 64 * 1024, 256, false};
  const TestRank big(1, shape);
  const TestRank small(2, shape);
  TransferRig rig(1, 32 * kMiB, [&](const RankMemory& m, Direction, const CopyRun&) {
    gate.pass();
    if (m.client.value == 2) runs_before_small = runs.load();
    ++runs;
    return Status::ok;
  });
  rig.engine->submit(make_transfer(1, big, kWrite, page_pairs(big, 256, 0, 0)));  // 16 MiB, a run per MiB
  gate.wait_for_caller();
  rig.engine->submit(make_transfer(2, small, kWrite, page_pairs(small, 1, 0, 300)));
  gate.open();
  REQUIRE(rig.results.wait(1).status == Status::ok);
  REQUIRE(rig.results.wait(2).status == Status::ok);
  REQUIRE(runs_before_small.load() == 4);  // a slice is 4 MiB
}

TEST_CASE("the destructor ends waiting transfers and finishes a running one") {
  const auto threads = GENERATE(1u, 3u);
  Gate gate;
  TransferRig rig(threads, 8 * kMiB, [&](const RankMemory&, Direction, const CopyRun&) {
    gate.pass();
    return Status::ok;
  });
  const TestRank rank(0);
  rank.fill(0, 5);
  rig.engine->submit(make_transfer(1, rank, kWrite, page_pairs(rank, 1, 0, 0)));
  gate.wait_for_caller();
  for (std::uint64_t id = 2; id < 10; ++id) {
    rig.engine->submit(fenced(make_transfer(id, rank, kWrite, page_pairs(rank, 1, 1, 1)), 0, 1));
  }
  if (threads == 1)
    rig.engine->submit(fenced(make_transfer(10, rank, kLoad, page_pairs(rank, 1, 2, 2)), 0, 4));
  std::thread opener([&] {
    sleep_ms(10);
    gate.open();
  });
  rig.engine.reset();
  opener.join();
  REQUIRE(rig.results.wait(1).status == Status::ok);
  REQUIRE(rank.host_holds(rig.pool.data(), 5));
  for (std::uint64_t id = 2; id < 10; ++id) REQUIRE(rig.results.wait(id).status == Status::shutting_down);
  if (threads == 1) {
    REQUIRE(rig.results.wait(10).status == Status::shutting_down);
    REQUIRE(rank.layers(0).failed.load() == 4);
    REQUIRE(rank.layers(0).layer[0].load() == 4);
  }
  REQUIRE(rank.memory().use_count() == 1);  // the engine keeps no memory of a transfer that has ended
}

TEST_CASE("many transfers of many ranks from several threads each end once with the right bytes") {
  const auto threads = GENERATE(1u, 4u);
  const std::uint64_t seed = std::random_device{}();
  INFO("seed " << seed);
  constexpr std::uint32_t kRanks = 4;
  constexpr int kRounds = 60;
  TransferRig rig(threads, 32 * kMiB);
  std::atomic<int> wrong{0};
  std::vector<std::unique_ptr<TestRank>> buffers;
  for (std::uint32_t r = 0; r < kRanks; ++r) {
    const auto attention = r % 2 == 0 ? Attention::mha : Attention::mla;
    buffers.push_back(std::make_unique<TestRank>(r, RankShape{attention, 3, 700, 64, r % 3 == 0}));
  }
  std::vector<std::thread> ranks;
  for (std::uint32_t r = 0; r < kRanks; ++r) {
    ranks.emplace_back([&, r] {
      std::mt19937_64 random(seed + r);
      const TestRank& rank = *buffers[r];
      std::uint32_t fence_value = 0;
      for (int round = 0; round < kRounds; ++round) {
        const std::uint64_t id = (std::uint64_t{r} * kRounds + static_cast<std::uint64_t>(round)) * 4 + 1;
        const auto count = 1 + static_cast<std::uint32_t>(random() % 16);
        const auto key = static_cast<std::uint32_t>(random());
        for (std::uint32_t i = 0; i < count; ++i) rank.fill(i, key + i);
        ++fence_value;
        rig.engine->submit(
            fenced(make_transfer(id, rank, kWrite, page_pairs(rank, count, 0, r * 64)), r, fence_value));
        // One more that never starts: its fence is not raised.
        rig.engine->submit(
            fenced(make_transfer(id + 1, rank, kWrite, page_pairs(rank, 1, 0, r * 64)), 40, 1));
        if (random() % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
        rank.fences().write[r].value.store(fence_value, std::memory_order_release);
        if (rig.results.wait(id).status != Status::ok) ++wrong;
        rig.engine->cancel(TransferId{id + 1});
        for (std::uint32_t i = 32; i < 32 + count; ++i) rank.poison(i);
        const auto slot = static_cast<std::uint32_t>(round) % kProducerSlots;
        const auto value = static_cast<std::uint32_t>(round) + 1;
        rig.engine->submit(
            fenced(make_transfer(id + 2, rank, kLoad, page_pairs(rank, count, 32, r * 64)), slot, value));
        if (!wait_layer(rank.layers(slot), 2, value)) ++wrong;
        for (std::uint32_t i = 0; i < count; ++i) wrong += rank.holds(32 + i, key + i) ? 0 : 1;
        if (rig.results.wait(id + 1).status != Status::timed_out) ++wrong;
        if (rig.results.wait(id + 2).status != Status::ok) ++wrong;
        for (std::uint64_t n = 0; n < 3; ++n) wrong += rig.results.times(id + n) == 1 ? 0 : 1;
      }
    });
  }
  for (auto& thread : ranks) thread.join();
  REQUIRE(wrong.load() == 0);
}

}  // namespace hicache::daemon
