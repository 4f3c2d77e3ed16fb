// hicache-ctl doctor: its report and its command line. Its checks: machine_test.cpp; the daemon's verdict on
// the same machine: tests/multiprocess/start_refusals_test.cpp.
#include "tools/ctl/doctor.hpp"

#include <nlohmann/json.hpp>
#include <string>

#include "tests/support/catch.hpp"
#include "tests/support/processes.hpp"

using namespace hicache;
using namespace hicache::ctl;
using machine::Check;
using machine::Level;

TEST_CASE("The doctor's report has a line for each check, JSON too, and fails when one is refused") {
  std::vector<Check> checks = {{"/dev/shm", Level::refused, "1 MiB free", "enlarge it"},
                               {"memory", Level::ok, "enough", ""},
                               {"open files", Level::degraded, "few\x1b[31m", "raise it"}};
  CHECK(doctor_exit_code(checks) == 1);
  const std::string text = doctor_text(checks);
  CHECK(text.find("refused  /dev/shm             1 MiB free\n") == 0);
  CHECK(text.find("-> enlarge it\n") != std::string::npos);
  CHECK(text.find('\x1b') == std::string::npos);
  CHECK(text.find("1 ok, 1 degraded, 1 refused\n") != std::string::npos);
  const auto doc = nlohmann::json::parse(doctor_json(checks));
  CHECK(doc["checks"].size() == 3);
  CHECK(doc["checks"][0]["level"] == "refused");
  CHECK(doc["refused"] == 1);
  checks.erase(checks.begin());
  CHECK(doctor_exit_code(checks) == 0);
}

TEST_CASE(
    "The doctor refuses a wrong command line, a hicached that is not there, and one that says nothing") {
  const auto run = [](std::vector<const char*> arguments) {
    arguments.insert(arguments.begin(), "doctor");
    return run_doctor(static_cast<int>(arguments.size()), arguments.data());
  };
  CHECK(run({"--nothing"}) == 2);
  CHECK(ask_needs("/nonexistent/hicached", "").status() == Status::daemon_absent);
  CHECK(ask_needs("/bin/false", "").status() == Status::invalid_argument);
  CHECK(ask_needs("/bin/true", "").status() == Status::version_mismatch);
  CHECK(run({"--hicached", "/nonexistent/hicached"}) == 2);
}

TEST_CASE("The doctor asks hicached for the needs of a configuration, which it may refuse") {
  const test::TempDir dir;
  test::write_text(dir.file("right.json"), R"({"name": "asked", "pool": {"bytes": "64MiB"}})");
  test::write_text(dir.file("wrong.json"), R"({"pool": {"bytes": "no size"}})");
  const auto needs = ask_needs(test::program("hicached"), dir.file("right.json"));
  REQUIRE(needs);
  CHECK(needs->name == "asked");
  CHECK(needs->pool_bytes == 64u << 20);
  CHECK(ask_needs(test::program("hicached"), dir.file("wrong.json")).status() == Status::invalid_argument);
  CHECK(ask_needs(test::program("hicached"), dir.file("none.json")).status() == Status::invalid_argument);
}
