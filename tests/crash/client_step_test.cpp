// A real client dies at every instruction of everything that it does in its channel. Whatever it leaves
// there, and whether the daemon takes what it finds before it hears of the death or not: everything of the
// client comes back, the tables stay sound, and another engine goes on.
#include <spdlog/spdlog.h>

#include <cstdio>

#include "tests/crash/stepping/client_walk.hpp"
#include "tests/support/catch.hpp"

using namespace hicache;
using namespace hicache::test;

namespace {

void step_everything(std::uint32_t first_position) {
  if (const std::string why = SteppedProcess::why_not(); !why.empty()) {
    WARN("SKIPPED: " << why);
    return;
  }
  spdlog::set_level(spdlog::level::off);
  TestDaemon named(kSmallDaemon);
  REQUIRE(named.stop() == 0);
  const auto config = daemon::load_config(named.config_path());
  REQUIRE(config.ok());
  const auto walks = step_client(
      *config, first_position, [](const std::string&) { return true; }, 20);
  REQUIRE(walks.size() == client_operations().size());
  for (const ClientWalk& walk : walks) {
    INFO(walk.operation);
    for (const std::string& fault : walk.faults) FAIL_CHECK(fault);
    if (std::string(walk.operation) != "detach") CHECK(walk.states > 0);
    std::printf("%s: %lu instructions, %zu states, each with every fate\n", walk.operation,
                static_cast<unsigned long>(walk.instructions), walk.states);
  }
}

}  // namespace

TEST_CASE("a client may die at any instruction: everything of it comes back and others go on") {
  step_everything(0);
}

TEST_CASE("a client may die at any instruction where the ring counters wrap") {
  step_everything(0xfffffffdu);
}
