// Many ranks that attach, work, detach, exit without detaching, or are killed, all at once and for many
// rounds.
#include <csignal>
#include <nlohmann/json.hpp>
#include <random>

#include "tests/support/catch.hpp"
#include "tests/support/test_rank.hpp"

namespace hicache::test {
namespace {

constexpr std::uint32_t kPrompts = 24;
constexpr std::uint32_t kPagesPerPrompt = 6;

// One engine's life: requests on shared prompts, every loaded byte compared. 0 = every byte was right.
int work(const TestDaemon& daemon, const std::string& engine, std::uint64_t seed, int requests, bool tidy) {
  std::mt19937_64 random(seed);
  TestRank rank(daemon, engine, 0, small_spec(random() % 2 ? Attention::mha : Attention::mla, 1));
  for (int r = 0; r < requests; ++r) {
    const auto hashes = prompt(static_cast<std::uint32_t>(random() % kPrompts), kPagesPerPrompt);
    const auto lease = rank.run(rank.session().reserve(static_cast<std::uint64_t>(r) + 1, hashes));
    if (lease.status != Status::ok) return 2;
    if (lease.hits > 0) {
      const auto pages = TestRank::pages(32, lease.hits);
      for (const DevicePage page : pages) rank.spoil(page);
      if (rank.run(rank.session().load(lease.lease, 0, pages)).status != Status::ok) return 3;
      for (std::uint32_t i = 0; i < lease.hits; ++i) {
        if (!rank.holds(pages[i], hashes[i])) return 4;
      }
    }
    if (lease.hits < kPagesPerPrompt) {
      const auto pages = TestRank::pages(0, kPagesPerPrompt - lease.hits);
      for (std::uint32_t i = 0; i < pages.size(); ++i) rank.fill(pages[i], hashes[lease.hits + i]);
      const auto written = rank.run(rank.session().write(lease.lease, lease.hits, pages));
      if (written.status != Status::ok) return 5;
    }
    // Some leases are left to whatever ends the process.
    if (random() % 8 != 0 && rank.run(rank.session().release(lease.lease)).status != Status::ok) return 6;
  }
  if (!tidy) ::_exit(0);  // no destructor, no Goodbye
  return 0;
}

}  // namespace

TEST_CASE(
    "ranks that come, work and go in every way leave no page, pin, lease or client behind, and no wrong "
    "byte") {
  const auto seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  const TestDaemon daemon(R"({"pool": {"max_pages": 60}, "limits": {"clients": 16},
                              "eviction": {"high_watermark": 0.95, "low_watermark": 0.8}})");
  const auto status = [&] { return nlohmann::json::parse(*control(daemon.socket_path(), {"status"})); };
  const std::size_t descriptors = descriptor_count(daemon.pid());
  constexpr int kRounds = 6;
  constexpr int kRanks = 8;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<Child> children;
    for (int i = 0; i < kRanks; ++i) {
      const std::uint64_t child_seed = random();
      const std::string engine = "engine-" + std::to_string(round) + "-" + std::to_string(i);
      children.push_back(Child::run([&, child_seed, engine, i] {
        return work(daemon, engine, child_seed, i == 0 ? 1'000'000 : 40, i % 2 == 0);
      }));
    }
    for (int i = 1; i < kRanks; ++i) {
      const auto ended = children[i].wait();
      REQUIRE(ended);
      INFO("rank " << i << " of round " << round << ": code " << ended->code << " signal " << ended->signal
                   << children[i].error_text());
      REQUIRE(ended->exited_with(0));
      if (i == kRanks / 2) children[0].kill(SIGKILL);  // in the middle of whatever it does
    }
    REQUIRE(children[0].wait());
    const auto check = run_program({program("hicache-dump"), daemon.name(), "--check"});
    INFO(check.out << check.err);
    REQUIRE(check.status.exited_with(0));
  }
  REQUIRE(eventually([&] { return status().at("counters").at("attached_clients") == 0; }));
  REQUIRE(eventually([&] { return status().at("counters").at("live_leases") == 0; }));
  const auto counters = status().at("counters");
  CHECK(counters.at("pinned_pages") == 0);
  CHECK(counters.at("ready_pages") == counters.at("resident_pages"));
  CHECK(counters.at("late_wakes") == 0);
  CHECK(counters.at("lost_clients").get<int>() >= kRounds);
  REQUIRE(eventually([&] { return descriptor_count(daemon.pid()) <= descriptors; }));
}

TEST_CASE(
    "a client that lets its completions pile up is refused, harms nobody, and is served on once it reads "
    "them") {
  // The coordinator sleeps until it is kicked; a park that ends with work but without a kick counts as a late
  // wake.
  const TestDaemon daemon(R"({"limits": {"submission_entries": 4, "completion_entries": 8},
                              "waiting": {"spin_us": 0, "yield_us": 0, "park_ms": 10000}})");
  TestRank lazy(daemon, "lazy", 0, small_spec(Attention::mha, 1));
  TestRank other(daemon, "other", 0, small_spec(Attention::mha, 1));
  std::uint32_t ended = 0;
  std::uint32_t posted = 0;
  std::uint32_t refused = 0;
  while (posted < 200) {
    // Posts until it is refused, then reads two: the rings stay full all the time.
    if (lazy.session().nop()) {
      ++posted;
      continue;
    }
    ++refused;
    CHECK(other.run(other.session().nop()).status == Status::ok);
    for (int i = 0; i < 2; ++i) {
      const auto result = lazy.session().wait_any(kPatienceMs);
      REQUIRE(result.ok());
      REQUIRE(result->status == Status::ok);
      ++ended;
    }
  }
  while (ended < posted) {
    REQUIRE(lazy.session().wait_any(kPatienceMs).ok());
    ++ended;
  }
  CHECK(refused > 0);
  const auto status = nlohmann::json::parse(*control(daemon.socket_path(), {"status"}));
  CHECK(status.at("counters").at("late_wakes") == 0);
}

}  // namespace hicache::test
