// The daemon dies at every instruction of every commit that changes the region, and at every instruction of
// the takeover that follows: whatever it leaves behind, the next one finds every page that was ready, with
// its bytes.
#include <spdlog/spdlog.h>

#include <cstdio>

#include "tests/crash/crash_rig.hpp"
#include "tests/crash/stepping/daemon_commits.hpp"
#include "tests/crash/stepping/daemon_walk.hpp"
#include "tests/support/catch.hpp"

using namespace hicache;
using namespace hicache::test;

namespace {

// Lets a process come to the state behind change `change` of an operation and kills it there.
void die_in(const daemon::Config& config, std::size_t operation, std::size_t change) {
  SteppedProcess process([&] { play(config); });
  for (std::size_t i = 0; i < 2 * operation + 1; ++i) REQUIRE(process.run_to_mark());
  WatchedRegion region(config.name);
  std::size_t seen = 0;
  process.step_to_mark([&] { return !region.changed() || ++seen <= change; });
  process.kill9();
}

// Every prompt of the operations, read through both ranks of a new engine. Wrong bytes fail the test.
std::uint32_t read_everything(TestDaemon& daemon) {
  TestRank rank0(daemon, "reader", 0, small_spec(Attention::mha, kTpSize));
  TestRank rank1(daemon, "reader", 1, small_spec(Attention::mha, kTpSize));
  std::uint32_t hits = 0;
  for (std::uint32_t id = 1; id <= 5; ++id) {
    const auto hashes = prompt(id, 5);
    std::vector<Ticket> reserves;
    for (TestRank* rank : {&rank0, &rank1}) reserves.push_back(*rank->session().reserve(id, hashes));
    const auto reserved = rank0.run(reserves[0]);
    REQUIRE(reserved.status == Status::ok);
    REQUIRE(rank1.run(reserves[1]).hits == reserved.hits);
    hits += reserved.hits;
    for (TestRank* rank : {&rank0, &rank1}) {
      if (reserved.hits == 0) continue;
      const auto pages = TestRank::pages(0, reserved.hits);
      for (const DevicePage page : pages) rank->spoil(page);
      REQUIRE(rank->run(rank->session().load(reserved.lease, 0, pages)).status == Status::ok);
      for (std::uint32_t i = 0; i < reserved.hits; ++i) REQUIRE(rank->holds(pages[i], hashes[i]));
    }
    for (TestRank* rank : {&rank0, &rank1}) rank->run(rank->session().release(reserved.lease));
  }
  return hits;
}

// The daemon's configuration, and a name that nobody uses.
daemon::Config stopped_config(TestDaemon& daemon) {
  REQUIRE(daemon.stop() == 0);
  auto config = daemon::load_config(daemon.config_path());
  REQUIRE(config.ok());
  return *config;
}

}  // namespace

TEST_CASE("the daemon may die at any instruction of any commit, and of the takeover after it") {
  if (const std::string why = SteppedProcess::why_not(); !why.empty()) {
    WARN("SKIPPED: " << why);
    return;
  }
  spdlog::set_level(spdlog::level::off);
  TestDaemon daemon(kSmallDaemon);
  const daemon::Config config = stopped_config(daemon);
  Recovery recovery(config);
  std::vector<std::size_t> changes;

  {
    SteppedProcess process([&] { play(config); });
    ReaderView view;
    for (const Commit& commit : commits()) {
      INFO(commit.name);
      REQUIRE(process.run_to_mark());
      WatchedRegion region(config.name);
      const auto before = ready_keys(region.tables());
      States states;
      const std::uint64_t started = process.instructions();
      const auto end = walk(process, region, recovery, &view, states);
      for (const std::string& fault : states.faults) FAIL_CHECK(fault);
      INFO(process.end());
      REQUIRE(end == SteppedProcess::Walk::at_mark);
      const auto after = ready_keys(region.tables());
      for (const std::string& fault : wrongly_kept(states, before, after)) FAIL_CHECK(fault);
      CHECK(states.kept.size() > 10);
      changes.push_back(states.kept.size());
      std::printf("%s: %lu instructions, %zu states, %zu pages ready before, %zu after\n", commit.name,
                  static_cast<unsigned long>(process.instructions() - started), states.kept.size(),
                  before.size(), after.size());
    }
    REQUIRE_FALSE(process.run_to_mark());
    CHECK(process.end() == "exit status 0");
  }

  // A real SIGKILL and a real daemon confirm it.
  for (std::size_t operation = 0; operation < commits().size(); ++operation) {
    INFO(commits()[operation].name);
    die_in(config, operation, changes[operation] / 2);
    daemon.start();
    CHECK(dump_findings(daemon.name()) == "");
    const std::uint32_t hits = read_everything(daemon);
    if (operation >= 3 && operation < 13) CHECK(hits >= 3);
    daemon.kill9();
  }

  // And the takeover of what such a death leaves.
  const std::size_t making_room = 9;
  REQUIRE(std::string(commits()[making_room].name) == "evict to make room");
  die_in(config, making_room, changes[making_room] / 2);
  WatchedRegion region(config.name);
  const auto kept = recovery.run(region.bytes(), region.pool()).kept;
  REQUIRE(kept.size() > 5);
  States states;
  SteppedProcess takeover([&] {
    SteppedProcess::mark();
    const DaemonInside next(config, daemon::RegionOwner::Start::take_over);
    SteppedProcess::mark();
  });
  REQUIRE(takeover.run_to_mark());
  const auto end = walk(takeover, region, recovery, nullptr, states);
  for (const std::string& fault : states.faults) FAIL_CHECK(fault);
  REQUIRE(end == SteppedProcess::Walk::at_mark);
  for (const auto& again : states.kept) REQUIRE(again == kept);
  CHECK(states.kept.size() > 100);
  std::printf("takeover: %lu instructions, %zu states\n", static_cast<unsigned long>(takeover.instructions()),
              states.kept.size());
}
