// The programs that README.md shows do what it says.
#include <filesystem>

#include "tests/support/catch.hpp"
#include "tests/support/processes.hpp"

using hicache::test::program;
using hicache::test::run_program;

TEST_CASE("the C++ example of README.md finds in its second request what the first one wrote") {
  const hicache::test::TestDaemon daemon;
  const auto run = run_program({program("examples/example_attach"), daemon.socket_path()});
  INFO(run.out << run.err);
  CHECK(run.status.exited_with(0));
  CHECK(run.out.find("request 1: 0 of 4 pages cached") != std::string::npos);
  CHECK(run.out.find("request 2: 4 of 4 pages cached") != std::string::npos);
}

TEST_CASE("the C example of README.md sees the pages of the C++ example's engine") {
  const std::string ask = program("examples/example_ask");
  if (!std::filesystem::exists(ask)) {
    WARN("SKIPPED: the C example is not part of sanitizer builds");
    return;
  }
  const hicache::test::TestDaemon daemon;
  const auto before = run_program({ask, daemon.socket_path()});
  INFO(before.out << before.err);
  CHECK(before.out.find("0 of 4 pages cached") != std::string::npos);
  CHECK(run_program({program("examples/example_attach"), daemon.socket_path()}).status.exited_with(0));
  const auto after = run_program({ask, daemon.socket_path()});
  INFO(after.out << after.err);
  CHECK(after.status.exited_with(0));
  CHECK(after.out.find("4 of 4 pages cached") != std::string::npos);
}

TEST_CASE("an example without a daemon ends with an error") {
  const auto run = run_program({program("examples/example_attach"), "/nonexistent/hicache.sock"});
  CHECK(run.status.exited_with(1));
  CHECK_FALSE(run.err.empty());
}
