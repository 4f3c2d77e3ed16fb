// Daemon and ranks are killed at random moments under load, round after round: HICACHE_KILL_ROUNDS of them
// (50).
#include <sys/mman.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "tests/crash/crash_rig.hpp"
#include "tests/crash/region_surgeon.hpp"
#include "tests/support/catch.hpp"

using namespace hicache;
using namespace hicache::test;

namespace {

constexpr std::uint32_t kPrompts = 60;  // more than the pool holds
constexpr std::uint32_t kPages = 6;

// What the workers tell, in memory that outlives them.
struct Score {
  std::atomic<std::uint64_t> requests{0};
  std::atomic<std::uint64_t> pages_read{0};
  std::atomic<std::uint64_t> wrong_pages{0};
};

Score& shared_score() {
  void* memory = ::mmap(nullptr, sizeof(Score), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return *new (memory) Score;
}

// One request: what is there is loaded and compared, the rest is written. False when the session is of no
// more use.
bool request(TestRank& rank, std::uint64_t sequence, Score& score) {
  // Some prompts come often enough to be found again; the others make the pool evict.
  const auto hashes =
      prompt(static_cast<std::uint32_t>(sequence * 7 % (sequence % 3 == 0 ? kPrompts : 9)), kPages);
  OperationResult reserved;
  while ((reserved = rank.run(rank.session().reserve(sequence, hashes))).status == Status::again) {
    if (rank.session().state() != Status::ok) return false;
  }
  if (reserved.status != Status::ok) return false;
  if (reserved.hits > 0) {
    const auto pages = TestRank::pages(0, reserved.hits);
    for (const DevicePage page : pages) rank.spoil(page);
    if (rank.run(rank.session().load(reserved.lease, 0, pages)).status == Status::ok) {
      for (std::uint32_t i = 0; i < reserved.hits; ++i) {
        ++score.pages_read;
        if (!rank.holds(pages[i], hashes[i])) ++score.wrong_pages;
      }
    }
  }
  if (const auto missing = kPages - reserved.hits; missing > 0) {
    const auto pages = TestRank::pages(8, missing);
    for (std::uint32_t i = 0; i < missing; ++i) rank.fill(pages[i], hashes[reserved.hits + i]);
    rank.run(rank.session().write(reserved.lease, reserved.hits, pages));
  }
  ++score.requests;
  return rank.run(rank.session().release(reserved.lease)).status == Status::ok;
}

struct Place {
  const char* engine;
  std::uint32_t tp_rank;
  std::uint32_t tp_size;
};
constexpr Place kPlaces[] = {{"wide", 0, 2}, {"wide", 1, 2}, {"narrow", 0, 1}, {"other", 0, 1}};

// Works until it is killed, whatever happens to the daemon and to the other rank of its engine.
Child worker(const TestDaemon& daemon, const Place& place, Score& score) {
  return Child::run([&daemon, place, &score]() -> int {
    for (;;) {
      try {
        TestRank rank(daemon, place.engine, place.tp_rank, small_spec(Attention::mha, place.tp_size));
        for (std::uint64_t sequence = 1; request(rank, sequence, score); ++sequence) {
        }
      } catch (const std::runtime_error&) {
        // No daemon at this moment, or the place is still taken by the one that was killed.
        const timespec nap{0, 1'000'000};
        ::nanosleep(&nap, nullptr);
      }
    }
  });
}

int rounds_wanted() {
  const char* text = std::getenv("HICACHE_KILL_ROUNDS");
  return text == nullptr ? 50 : std::atoi(text);
}

}  // namespace

TEST_CASE("daemon and ranks killed at random moments: nobody hangs, no page is lost or wrong") {
  TestDaemon daemon(R"({"pool": {"bytes": "1MiB", "segment_bytes": "64KiB"},
                        "limits": {"operation_deadline_ms": 3000}})");
  Score& score = shared_score();
  std::vector<Child> workers;
  for (const Place& place : kPlaces) workers.push_back(worker(daemon, place, score));
  const unsigned seed = std::random_device{}();
  std::mt19937 random(seed);
  std::uint64_t takeovers = 0;
  for (int round = 0; round < rounds_wanted(); ++round) {
    INFO("seed " << seed << " round " << round);
    const timespec moment{0, static_cast<long>(random() % 40'000'000)};
    ::nanosleep(&moment, nullptr);
    if (random() % 2 == 0) {
      daemon.kill9();
      const std::size_t ready = RegionSurgeon(daemon.name()).ready_pages().size();
      daemon.start();
      INFO(daemon.log());
      REQUIRE(daemon.log().find(std::to_string(ready) + " of " + std::to_string(ready) +
                                " ready pages kept") != std::string::npos);
      ++takeovers;
    } else {
      const std::size_t victim = random() % std::size(kPlaces);
      workers[victim].kill(SIGKILL);
      REQUIRE(workers[victim].wait().has_value());
      workers[victim] = worker(daemon, kPlaces[victim], score);
    }
    REQUIRE(dump_findings(daemon.name()) == "");
    // Work goes on.
    const std::uint64_t before = score.requests;
    REQUIRE(eventually([&] { return score.requests > before + 4; }));
    REQUIRE(score.wrong_pages == 0);
  }
  for (Child& one : workers) one.kill(SIGKILL);
  workers.clear();
  CHECK(eventually([&] {
    const RegionSurgeon region(daemon.name());
    return region.counter(Counter::attached_clients) == 0 && region.counter(Counter::live_leases) == 0 &&
           region.counter(Counter::pinned_pages) == 0 &&
           region.counter(Counter::resident_pages) == region.ready_pages().size();
  }));
  CHECK(dump_findings(daemon.name()) == "");
  CHECK(score.pages_read > 0);
  std::printf("%d rounds, %lu takeovers, %lu requests, %lu pages read, %lu wrong\n", rounds_wanted(),
              static_cast<unsigned long>(takeovers), static_cast<unsigned long>(score.requests),
              static_cast<unsigned long>(score.pages_read), static_cast<unsigned long>(score.wrong_pages));
  CHECK(daemon.stop() == 0);
  CHECK(shm_leftovers(daemon.name()).empty());
}
