// The daemon dies at every instruction of every commit that changes the region, and at every instruction of
// the takeover that follows: whatever it leaves behind, the next one finds every page that was ready, with
// its bytes.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <set>

#include "tests/crash/crash_rig.hpp"
#include "tests/crash/stepping/local_rank.hpp"
#include "tests/crash/stepping/recovery.hpp"
#include "tests/crash/stepping/single_step.hpp"
#include "tests/crash/stepping/watched_region.hpp"
#include "tests/support/catch.hpp"

using namespace hicache;
using namespace hicache::test;

namespace {

constexpr std::uint32_t kTpSize = 2;

// Two ranks of one group inside a daemon.
struct Stage {
  explicit Stage(const daemon::Config& c) : config(c), daemon(c, daemon::RegionOwner::Start::fresh) {
    restart_ranks();
    for (auto& rank : ranks) rank->post_attach(daemon);
    daemon.settle();
    register_buffers();
  }
  void restart_ranks() {
    ranks.clear();
    for (std::uint32_t r = 0; r < kTpSize; ++r)
      ranks.push_back(std::make_unique<LocalRank>(config, small_spec(Attention::mha, kTpSize), r));
  }
  void register_buffers() {
    for (auto& rank : ranks) rank->post_buffers(daemon);
    daemon.settle();
  }
  void reserve(const std::vector<PrefixHash>& hashes) {
    ++sequence;
    for (auto& rank : ranks) rank->post_reserve(sequence, hashes);
  }
  // Takes the answers of one operation from both ranks; keeps the last.
  void answers(Status expected = Status::ok) {
    for (auto& rank : ranks) answer = rank->next();
    if (answer.status != expected)
      throw std::runtime_error("answer: " + std::string(to_string(answer.status)));
  }
  void write(const std::vector<PrefixHash>& hashes) {
    const std::uint32_t first = answer.hits;
    const auto count = static_cast<std::uint32_t>(hashes.size()) - first;
    for (auto& rank : ranks) {
      for (std::uint32_t i = 0; i < count; ++i) rank->fill(i, hashes[first + i]);
      rank->post_copy(Opcode::write, answer.lease, first, count);
    }
  }
  void release() {
    for (auto& rank : ranks) rank->post_release(answer.lease);
  }
  // A whole request, not looked at closely.
  void store(const std::vector<PrefixHash>& hashes) {
    reserve(hashes);
    daemon.settle();
    answers();
    if (answer.hits < hashes.size()) {
      write(hashes);
      daemon.settle();
      answers();
    }
    release();
    daemon.settle();
    answers();
  }
  void control(std::vector<std::string> arguments) {
    daemon.coordinator().inbox.post(
        daemon::ControlRequest{std::move(arguments), [](Status status, const std::string& text) {
                                 if (status != Status::ok) throw std::runtime_error(text);
                               }});
  }

  const daemon::Config config;
  DaemonInside daemon;
  std::vector<std::unique_ptr<LocalRank>> ranks;
  std::uint64_t sequence = 0;
  Completion answer;
};

// A commit of the daemon: made ready, then stepped through.
struct Operation {
  const char* name;
  std::function<void(Stage&)> prepare;
  std::function<void(Stage&)> commit;
};

void settle(Stage& s) {
  s.daemon.settle();
}

const std::vector<Operation>& operations() {
  static const auto short_prompt = prompt(1, 3);
  static const auto long_prompt = prompt(1, 5);
  static const std::vector<Operation> all = {
      {"reserve", [](Stage& s) { s.reserve(short_prompt); }, settle},
      {"admit",
       [](Stage& s) {
         s.answers();
         s.daemon.transfers().hold();
         s.write(short_prompt);
       },
       settle},
      {"publish", [](Stage& s) { s.daemon.transfers().let_go(); }, settle},
      {"release",
       [](Stage& s) {
         s.answers();
         s.release();
       },
       settle},
      {"reserve of ready pages",
       [](Stage& s) {
         s.answers();
         s.reserve(long_prompt);
       },
       settle},
      {"load",
       [](Stage& s) {
         s.answers();
         for (auto& rank : s.ranks) rank->post_copy(Opcode::load, s.answer.lease, 0, s.answer.hits);
       },
       settle},
      {"admit and publish behind ready pages",
       [](Stage& s) {
         for (auto& rank : s.ranks) rank->next();
         s.answer.hits = 3;
         s.write(long_prompt);
       },
       settle},
      {"release of shared pages",
       [](Stage& s) {
         s.answers();
         s.release();
       },
       settle},
      {"evict",
       [](Stage& s) {
         s.answers();
         s.store(prompt(2, 4));
         s.control({"evict", "2"});
       },
       settle},
      {"evict to make room",
       [](Stage& s) {
         s.store(prompt(3, 5));
         s.reserve(prompt(4, 4));
         s.daemon.settle();
         s.answers();
         s.write(prompt(4, 4));
       },
       settle},
      {"death of a rank that fills pages",
       [](Stage& s) {
         s.answers();
         s.release();
         s.daemon.settle();
         s.answers();
         s.daemon.transfers().hold();
         s.reserve(prompt(5, 2));
         s.daemon.settle();
         s.answers();
         s.write(prompt(5, 2));
         s.daemon.settle();
         s.ranks[1]->post_gone(s.daemon, false);
       },
       settle},
      {"detach", [](Stage& s) { s.ranks[0]->post_gone(s.daemon, true); }, settle},
      {"attach",
       [](Stage& s) {
         s.daemon.transfers().let_go();
         s.daemon.settle();
         s.restart_ranks();
         for (auto& rank : s.ranks) rank->post_attach(s.daemon);
       },
       settle},
      {"bump of the weights epoch",
       [](Stage& s) {
         s.register_buffers();
         s.sequence = 0;
         s.store(prompt(3, 5));
         s.control(
             {"namespace", "bump", to_hex(small_spec(Attention::mha, kTpSize).base_digest()).substr(0, 16)});
       },
       settle},
  };
  return all;
}

void play(const daemon::Config& config) {
  Stage stage(config);
  for (const Operation& operation : operations()) {
    operation.prepare(stage);
    SteppedProcess::mark();
    operation.commit(stage);
    SteppedProcess::mark();
  }
}

struct States {
  std::vector<std::set<Key>> kept;  // by each distinct state what a takeover of it keeps
  std::vector<std::string> faults;
};

SteppedProcess::Walk walk(SteppedProcess& process, WatchedRegion& region, Recovery& recovery,
                          States& states) {
  region.changed();
  return process.step_to_mark([&] {
    if (!region.changed()) return true;
    auto outcome = recovery.run(region.bytes(), region.pool());
    states.kept.push_back(std::move(outcome.kept));
    for (auto& fault : outcome.faults) states.faults.push_back(std::move(fault));
    return states.faults.size() < 20;
  });
}

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
    for (const Operation& operation : operations()) {
      INFO(operation.name);
      REQUIRE(process.run_to_mark());
      WatchedRegion region(config.name);
      const auto before = ready_keys(region.tables());
      States states;
      const std::uint64_t started = process.instructions();
      const auto end = walk(process, region, recovery, states);
      for (const std::string& fault : states.faults) FAIL_CHECK(fault);
      INFO(process.end());
      REQUIRE(end == SteppedProcess::Walk::at_mark);
      const auto after = ready_keys(region.tables());
      std::set<Key> stays;
      std::set_intersection(before.begin(), before.end(), after.begin(), after.end(),
                            std::inserter(stays, stays.end()));
      std::set<Key> ever = before;
      ever.insert(after.begin(), after.end());
      for (const auto& kept : states.kept) {
        REQUIRE(std::includes(kept.begin(), kept.end(), stays.begin(), stays.end()));
        REQUIRE(std::includes(ever.begin(), ever.end(), kept.begin(), kept.end()));
      }
      CHECK(states.kept.size() > 10);
      changes.push_back(states.kept.size());
      std::printf("%s: %lu instructions, %zu states, %zu pages ready before, %zu after\n", operation.name,
                  static_cast<unsigned long>(process.instructions() - started), states.kept.size(),
                  before.size(), after.size());
    }
    REQUIRE_FALSE(process.run_to_mark());
    CHECK(process.end() == "exit status 0");
  }

  // A real SIGKILL and a real daemon confirm it.
  for (std::size_t operation = 0; operation < operations().size(); ++operation) {
    INFO(operations()[operation].name);
    die_in(config, operation, changes[operation] / 2);
    daemon.start();
    CHECK(dump_findings(daemon.name()) == "");
    const std::uint32_t hits = read_everything(daemon);
    if (operation >= 3 && operation < 13) CHECK(hits >= 3);
    daemon.kill9();
  }

  // And the takeover of what such a death leaves.
  const std::size_t making_room = 9;
  REQUIRE(std::string(operations()[making_room].name) == "evict to make room");
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
  const auto end = walk(takeover, region, recovery, states);
  for (const std::string& fault : states.faults) FAIL_CHECK(fault);
  REQUIRE(end == SteppedProcess::Walk::at_mark);
  for (const auto& again : states.kept) REQUIRE(again == kept);
  CHECK(states.kept.size() > 100);
  std::printf("takeover: %lu instructions, %zu states\n", static_cast<unsigned long>(takeover.instructions()),
              states.kept.size());
}
