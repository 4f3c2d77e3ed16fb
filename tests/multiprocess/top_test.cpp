// hicache-top and hicache-dump --metrics beside a real daemon: what they show is what happened.
#include <unistd.h>

#include <algorithm>
#include <map>
#include <regex>
#include <sstream>

#include "tests/support/catch.hpp"
#include "tests/support/storage_daemon.hpp"
#include "tools/top/screen.hpp"

namespace hicache::test {
namespace {

// Values by name with labels. Fails the test on a line that is no comment and no sample.
std::map<std::string, double> parse_metrics(const std::string& text) {
  static const std::regex sample(R"re(([a-z_]+\{[^{}]*\}) ([0-9.e+]+))re");
  std::map<std::string, double> values;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("# HELP ", 0) == 0 || line.rfind("# TYPE ", 0) == 0) continue;
    std::smatch match;
    INFO(line);
    REQUIRE(std::regex_match(line, match, sample));
    REQUIRE(values.emplace(match[1], std::stod(match[2])).second);
  }
  return values;
}

RunResult metrics(const std::string& name) {
  return run_program({program("hicache-dump"), name, "--metrics"});
}

std::string of_daemon(const std::string& metric, const std::string& name) {
  return metric + "{daemon=\"" + name + "\"}";
}

}  // namespace

TEST_CASE("metrics hold every counter, and those of what happened have its value") {
  const TestDaemon daemon;
  TestRank rank(daemon, "engine", 0, small_spec(Attention::mha, 1));
  REQUIRE(write_prompt(rank, 1, prompt(1, 6)) == 6);
  const RunResult run = metrics(daemon.name());
  REQUIRE(run.status.exited_with(0));
  const auto values = parse_metrics(run.out);
  CHECK(values.at(of_daemon("hicache_up", daemon.name())) == 1);
  CHECK(values.at(of_daemon("hicache_written_total", daemon.name())) == 6);
  CHECK(values.at(of_daemon("hicache_ready_pages", daemon.name())) == 6);
  std::size_t of_counters = 0;
  for (std::uint32_t i = 0; i < kCounterCount; ++i) {
    const std::string base = "hicache_" + std::string(counter_name(static_cast<Counter>(i)));
    of_counters += values.count(of_daemon(base, daemon.name())) +
                   values.count(of_daemon(base + "_total", daemon.name()));
  }
  CHECK(of_counters == kCounterCount);
  bool client_found = false;
  for (const auto& [name, value] : values) {
    if (name.rfind("hicache_client_bytes_written_total{", 0) != 0) continue;
    client_found = true;
    CHECK(name.find("engine=\"engine\"") != std::string::npos);
    CHECK(name.find("pid=\"" + std::to_string(::getpid()) + "\"") != std::string::npos);
    CHECK(value == 6.0 * static_cast<double>(small_spec(Attention::mha, 1).shard_bytes()));
  }
  CHECK(client_found);
}

TEST_CASE("metrics of a killed daemon say that it is down and keep its last values") {
  TestDaemon daemon;
  TestRank rank(daemon, "engine", 0, small_spec(Attention::mha, 1));
  REQUIRE(write_prompt(rank, 1, prompt(1, 3)) == 3);
  daemon.kill9();
  const auto values = parse_metrics(metrics(daemon.name()).out);
  CHECK(values.at(of_daemon("hicache_up", daemon.name())) == 0);
  CHECK(values.at(of_daemon("hicache_written_total", daemon.name())) == 3);
}

TEST_CASE("metrics stand alone on the command line") {
  const RunResult run = run_program({program("hicache-dump"), "any", "--metrics", "--json"});
  CHECK(run.status.exited_with(5));
  CHECK(run.err.find("--metrics") != std::string::npos);
}

TEST_CASE("hicache-top shows the daemon, its pages and its ranks, and ends after --count screens") {
  TestDaemon daemon;
  TestRank rank(daemon, "top-engine", 0, small_spec(Attention::mha, 1));
  REQUIRE(write_prompt(rank, 1, prompt(1, 5)) == 5);
  const RunResult run =
      run_program({program("hicache-top"), daemon.name(), "--count", "2", "--interval", "0.1"});
  REQUIRE(run.status.exited_with(0));
  CHECK(run.out.find("hicache " + daemon.name() + ": alive (pid " + std::to_string(daemon.pid()) + ")") !=
        std::string::npos);
  CHECK(run.out.find("5 ready") != std::string::npos);
  CHECK(run.out.find("top-engine") != std::string::npos);
  CHECK(run.out.find(std::to_string(::getpid())) != std::string::npos);
  CHECK(run.out.find('\033') == std::string::npos);  // no terminal, no control sequences
  daemon.kill9();
  const RunResult dead =
      run_program({program("hicache-top"), daemon.name(), "--count", "1", "--interval", "0.1"});
  CHECK(dead.status.exited_with(0));
  CHECK(dead.out.find(": dead (pid ") != std::string::npos);
}

TEST_CASE(
    "hicache-top shows storage: breaker, hits, what waits and what was lost; nothing where there is none") {
  const auto top = [](const TestDaemon& daemon) {
    return run_program({program("hicache-top"), daemon.name(), "--count", "1", "--interval", "0.1"}).out;
  };
  {
    const TestDaemon without;
    CHECK(top(without).find("storage") == std::string::npos);
  }
  const StallFile stall;
  StorageDaemon rig(R"({"memory": {"stall_while": ")" + stall.path() +
                    R"("}, "batch_deadline_ms": 30, "breaker_failures": 1, "breaker_suspend_ms": 600000})");
  TestRank rank(rig.daemon(), "engine", 0, small_spec(Attention::mha, 1));
  const auto hashes = prompt(1, 5);
  rig.store(rank, 1, hashes);
  const auto reserved = rank.run(rank.session().reserve(2, hashes));
  REQUIRE(rank.run(rank.session().prefetch(reserved.lease, 0, 5, PrefetchPolicy::wait_complete)).written ==
          5);
  std::string shown = top(rig.daemon());
  INFO(shown);
  CHECK(shown.find("storage  attached, suspended 0 times") != std::string::npos);
  CHECK(shown.find("since start 100.0 %") != std::string::npos);
  CHECK(shown.find("pages backed up 5, fetched 5; not backed up 0") != std::string::npos);
  stall.begin();
  REQUIRE(write_prompt(rank, 3, prompt(2, 4)) == 4);
  REQUIRE(eventually([&] { return rig.counter("storage_suspensions") == 1; }));
  shown = top(rig.daemon());
  CHECK(shown.find("storage  suspended, suspended 1 times") != std::string::npos);
  CHECK(shown.find("not backed up 4") != std::string::npos);
  CHECK(shown.find("late batches 1") != std::string::npos);
  stall.end();
}

TEST_CASE("hicache-top names a daemon that does not exist") {
  const RunResult run = run_program({program("hicache-top"), "no-such-daemon", "--count", "1"});
  CHECK(run.status.exited_with(4));
  CHECK(run.err.find("no-such-daemon") != std::string::npos);
}

TEST_CASE("rates are differences over time, and none across two lives of a daemon") {
  top::Reading before;
  before.usable = true;
  before.time_ns = 1'000'000'000;
  before.header.instance_epoch = 7;
  before.counters[static_cast<std::size_t>(Counter::hits)] = 100;
  top::Reading after = before;
  after.time_ns += 2'000'000'000;
  after.counters[static_cast<std::size_t>(Counter::hits)] = 150;
  inspect::ClientRow client;
  client.slot = 1;
  client.generation = 1;
  client.bytes_loaded = 4'000'000'000;
  after.clients.push_back(client);  // came in between: counts from zero
  const top::Rates rates = top::rates_between(before, after);
  CHECK(rates.rate(Counter::hits) == 25.0);
  REQUIRE(rates.clients.size() == 1);
  CHECK(rates.clients[0].bytes_loaded == 2e9);
  after.header.instance_epoch = 8;
  CHECK(top::rates_between(before, after).rate(Counter::hits) == 0.0);
}

TEST_CASE("a screen keeps to its rows and counts the clients that do not fit") {
  top::Reading reading;
  reading.usable = true;
  reading.page_capacity = 10;
  top::Rates rates;
  for (std::uint32_t i = 0; i < 30; ++i) {
    top::ClientRate client;
    client.row.slot = i;
    rates.clients.push_back(client);
  }
  const std::string text = top::screen(reading, rates, 20);
  CHECK(std::count(text.begin(), text.end(), '\n') == 20);
  CHECK(text.find("more clients") != std::string::npos);
}

}  // namespace hicache::test
