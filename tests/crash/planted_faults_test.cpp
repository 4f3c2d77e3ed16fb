// The step tests can fail: faults planted in the daemon's own code (CMakeLists.txt of this directory) are
// found by the walks that find none without them.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/crash/stepping/client_walk.hpp"
#include "tests/crash/stepping/daemon_commits.hpp"
#include "tests/crash/stepping/daemon_walk.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/planted_fault.hpp"

using namespace hicache;
using namespace hicache::test;

namespace {

struct Expected {
  const char* fault;
  const char* commit;  // whose walk finds it
  const char* report;  // part of what it says
};

constexpr Expected kInDaemon[] = {
    {"ready before its bytes", "admit", "is ready with bytes that are not its own"},
    {"ready before its seal", "publish", "is ready without its seal"},
    {"indexed before it is complete", "admit", "is in the index before it is complete"},
    {"generation kept", "evict to make room", "has another key than before in the same generation"},
    {"ready before its shards", "publish", "is ready without all its shards"},
    {"takeover forgets a page", "load", "a takeover loses a page that was ready all the time"},
    {"takeover begins generations again", "attach", "goes back to an earlier generation"},
};

constexpr Expected kInDeathOfClients[] = {
    {"lease of the dead", "write", "a lease is left"},
    {"pins of the dead", "write", "a pin is left"},
    {"pages of the dead", "write", "a page is neither free nor ready"},
    {"others lose their pages", "submit", "the other engine's pages are gone"},
};

std::string all(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "; ";
  return text;
}

// What a walk through one commit finds.
std::string walk_through(const daemon::Config& config, const std::string& name) {
  Recovery recovery(config);
  SteppedProcess process([&] { play(config); });
  ReaderView view;
  for (const Commit& commit : commits()) {
    if (!process.run_to_mark()) return "the stepped process ended: " + process.end();
    WatchedRegion region(config.name);
    States states;
    states.enough = 1;
    states.faults = view.look(region.tables(), region.pool());
    if (name == commit.name && states.faults.empty()) {
      const auto before = ready_keys(region.tables());
      const auto end = walk(process, region, recovery, &view, states);
      if (end == SteppedProcess::Walk::at_mark)
        states.faults = wrongly_kept(states, before, ready_keys(region.tables()));
      return all(states.faults);
    }
    if (!states.faults.empty()) return all(states.faults);
    if (!process.run_to_mark()) return "the stepped process ended: " + process.end();
  }
  return "no commit has that name";
}

// The configuration of a daemon that was stopped: its name is free.
daemon::Config stopped(TestDaemon& daemon) {
  REQUIRE(daemon.stop() == 0);
  auto config = daemon::load_config(daemon.config_path());
  REQUIRE(config.ok());
  return *config;
}

}  // namespace

TEST_CASE("faults planted in the daemon's commits and takeover are found by stepping through them") {
  if (const std::string why = SteppedProcess::why_not(); !why.empty()) {
    WARN("SKIPPED: " << why);
    return;
  }
  spdlog::set_level(spdlog::level::off);
  TestDaemon daemon(kSmallDaemon);
  const daemon::Config config = stopped(daemon);
  CHECK(walk_through(config, "admit") == "");
  for (const Expected& expected : kInDaemon) {
    const PlantedFault awake(expected.fault);
    INFO(expected.fault);
    const std::string found = walk_through(config, expected.commit);
    INFO("found: " << found);
    CHECK(found.find(expected.report) != std::string::npos);
  }
}

TEST_CASE(
    "faults planted in what the daemon does about a dead client are found by stepping through the client") {
  if (const std::string why = SteppedProcess::why_not(); !why.empty()) {
    WARN("SKIPPED: " << why);
    return;
  }
  spdlog::set_level(spdlog::level::off);
  for (const Expected& expected : kInDeathOfClients) {
    TestDaemon daemon(kSmallDaemon);
    const daemon::Config config = stopped(daemon);
    const PlantedFault awake(expected.fault);
    INFO(expected.fault);
    const auto walks = step_client(
        config, 0, [&](const std::string& name) { return name == expected.commit; }, 1);
    REQUIRE(walks.size() == 1);
    const std::string found = all(walks[0].faults);
    INFO("found: " << found);
    CHECK(found.find(expected.report) != std::string::npos);
  }
}
