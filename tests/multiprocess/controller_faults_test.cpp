// The property test of the controller can fail: faults planted in the controller's own code (CMakeLists.txt
// of this directory) are found by the comparisons that find none without them.
#include <cstdio>
#include <string>

#include "tests/multiprocess/controller_round.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/planted_fault.hpp"

namespace hicache::test {
namespace {

struct Planted {
  const char* fault;
  bool everywhere;     // else in rank 1 alone
  const char* report;  // what a rank must say, or nullptr when the ranks must differ
};

constexpr Planted kFaults[] = {
    {"none", true, ""},
    {"written node not locked", true, "tree and model differ"},
    {"device slots lost", true, "device slots are lost"},
    {"loaded into each other's slots", true, "a loaded page holds something else"},
    {"a rank's own view of a write", false, nullptr},
};

}  // namespace

TEST_CASE(
    "faults planted in the controller are found by the model, by the pages' bytes or by the other ranks") {
  for (const Planted& planted : kFaults) {
    INFO(planted.fault);
    const TestDaemon daemon(kStarvedPool);
    Round round;
    round.seed = 20;
    round.steps = 400;
    round.prepare = [&](std::uint32_t rank) {
      if (planted.everywhere || rank == 1) awake_fault() = planted.fault;
    };
    const auto said = play(daemon, round);
    std::string ends;
    for (const std::string& one : said)
      ends += one.substr(one.size() - std::min<std::size_t>(one.size(), 300)) + "\n";
    INFO(ends);
    if (planted.fault == std::string("none")) {
      CHECK(ends.find("failed") == std::string::npos);
      CHECK(decided_alike(said, round));
    } else if (planted.report == nullptr) {
      CHECK_FALSE(decided_alike(said, round));
    } else {
      CHECK(ends.find(planted.report) != std::string::npos);
    }
  }
}

}  // namespace hicache::test
