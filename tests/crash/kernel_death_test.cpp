// Deaths around io_backend kernel: a rank that maps the pool and dies, hangs, or outlives its daemon. Pages
// that its kernels may still write to are nobody's until its process is gone. Here these "kernels" are a
// process that never stops writing to the pages it has been leased.
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <nlohmann/json.hpp>
#include <random>

#include "tests/crash/crash_rig.hpp"
#include "tests/crash/scribbler.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/raw_rank.hpp"

namespace hicache::test {
namespace {

// A pool of few pages: whoever writes enough gets every slot that can be had.
constexpr const char* kSmallPool =
    R"({"pool": {"map_engines": ["scribbler", "engine"], "bytes": "1MiB", "segment_bytes": "64KiB"}})";

nlohmann::json counters(const TestDaemon& daemon) {
  return nlohmann::json::parse(*control(daemon.socket_path(), {"status"})).at("counters");
}

nlohmann::json dump(const TestDaemon& daemon) {
  return nlohmann::json::parse(
      run_program({program("hicache-dump"), daemon.name(), "--ranks", "--json"}).out);
}

// Fills the pool several times over and reads back what is left: every slot that can be had is used.
void use_every_page(TestDaemon& daemon, const std::string& engine) {
  TestRank rank(daemon, engine, 0, small_spec(Attention::mha, 1));
  std::uint64_t sequence = 0;
  for (std::uint32_t round = 0; round < 3; ++round) {
    for (std::uint32_t i = 0; i < 20; ++i) write_prompt(rank, ++sequence, prompt(round * 20 + i, 30));
    for (std::uint32_t i = 0; i < 20; ++i) {
      const ReadBack read = read_back(rank, ++sequence, prompt(round * 20 + i, 30));
      CHECK(read.status == Status::ok);
      CHECK(read.wrong == 0);
    }
  }
}

}  // namespace

TEST_CASE("SIGKILL of a kernel-mode rank in mid write frees its pages once its process is gone") {
  TestDaemon daemon(kSmallPool);
  auto child = scribbler(daemon);
  slot_of(child);
  REQUIRE(counters(daemon).at("resident_pages") == kLeased);
  child.kill(SIGKILL);
  INFO(daemon.log());
  REQUIRE(eventually([&] { return counters(daemon).at("resident_pages") == 0; }));
  CHECK(dump_findings(daemon.name()) == "");
  use_every_page(daemon, "other");
}

TEST_CASE("SIGKILL of a kernel-mode rank in mid load gives its pins back and keeps the pages") {
  TestDaemon daemon(kSmallPool);
  const auto hashes = prompt(1, 8);
  TestRank writer(daemon, "writer", 0, small_spec(Attention::mha, 1));
  REQUIRE(write_prompt(writer, 1, hashes) == 8);
  auto loader = Child::run([&] {
    const auto spec = small_spec(Attention::mha, 1);
    RawRank rank(daemon, "engine", 0, spec, true, kFeatureKernel);
    const std::uint64_t lease = rank.run(rank.reserve(1, hashes)).lease;
    rank.post(rank.transfer(Opcode::load, lease, 0, 8));
    rank.take_request(true);
    std::printf("taken\n");
    std::fflush(stdout);
    ::pause();
    return 0;
  });
  REQUIRE(loader.read_line() == "taken");
  CHECK(counters(daemon).at("pinned_pages") == 8);
  loader.kill(SIGKILL);
  REQUIRE(eventually([&] { return counters(daemon).at("pinned_pages") == 0; }));
  CHECK(read_back(writer, 2, hashes).hits == 8);
  CHECK(dump_findings(daemon.name()) == "");
}

TEST_CASE("an evicted kernel-mode rank that lives keeps its pages from everybody until it is gone") {
  const bool stopped = GENERATE(true, false);
  TestDaemon daemon(kSmallPool);
  auto child = scribbler(daemon);
  const std::string slot = slot_of(child);
  if (stopped) child.kill(SIGSTOP);
  const auto evicted = run_program({program("hicache-ctl"), daemon.name(), "evict-client", slot});
  REQUIRE(evicted.status.exited_with(0));
  // It may go on at any time, and what it was leased is written to.
  child.kill(SIGCONT);
  use_every_page(daemon, "other");
  CHECK(counters(daemon).at("resident_pages") >= kLeased);
  const auto clients = dump(daemon).at("clients");  // the other one may still be leaving
  const auto found = std::find_if(clients.begin(), clients.end(),
                                  [](const auto& client) { return client.at("engine") == "scribbler"; });
  REQUIRE(found != clients.end());
  CHECK(found->at("state") == "dying");
  CHECK(found->at("maps_pool") == true);
  CHECK(dump_findings(daemon.name()) == "");
  child.kill(SIGKILL);
  REQUIRE(eventually([&] { return dump(daemon).at("clients").empty(); }));
  CHECK(counters(daemon).at("resident_pages") == counters(daemon).at("ready_pages"));
  use_every_page(daemon, "again");
}

TEST_CASE("a daemon that takes over holds the pages of a kernel-mode rank that lives, through any restart") {
  TestDaemon daemon(kSmallPool);
  const auto kept = prompt(77, 5);
  {
    TestRank writer(daemon, "writer", 0, small_spec(Attention::mha, 1));
    REQUIRE(write_prompt(writer, 1, kept) == 5);
  }
  auto child = scribbler(daemon);
  slot_of(child);
  const bool evicted_first = GENERATE(false, true);
  if (evicted_first) {
    // The page is aborting, and its lease and client are on their way out.
    const auto clients = dump(daemon).at("clients");
    run_program({program("hicache-ctl"), daemon.name(), "evict-client",
                 std::to_string(clients.at(0).at("slot").get<unsigned>())});
  }
  for (std::uint32_t restart = 0; restart < 3; ++restart) {
    daemon.kill9();
    daemon.start();
    INFO(daemon.log());
    CHECK(daemon.log().find("6 pages are held: 1 processes") != std::string::npos);
    REQUIRE(counters(daemon).at("held_pages") == kLeased);
    CHECK(counters(daemon).at("attached_clients") == 0);
    CHECK(dump_findings(daemon.name()) == "");
    TestRank reader(daemon, "reader", 0, small_spec(Attention::mha, 1));
    if (restart == 0) {
      const ReadBack read = read_back(reader, 1, kept);
      CHECK(read.hits == 5);
      CHECK(read.wrong == 0);
    }
    // What was half written is never served.
    CHECK(reader.session().probe(prompt(900, kLeased)).leading == 0);
    reader.detach();
    use_every_page(daemon, "other-" + std::to_string(restart));
    REQUIRE(counters(daemon).at("held_pages") == kLeased);
  }
  child.kill(SIGKILL);
  REQUIRE(eventually([&] { return counters(daemon).at("held_pages") == 0; }));
  CHECK(counters(daemon).at("resident_pages") == counters(daemon).at("ready_pages"));
  REQUIRE(eventually([&] { return dump(daemon).at("clients").empty(); }));
  use_every_page(daemon, "last");
  CHECK(dump_findings(daemon.name()) == "");
  CHECK(daemon.stop() == 0);
}

TEST_CASE("a daemon that takes over after the kernel-mode rank died holds nothing") {
  TestDaemon daemon(kSmallPool);
  auto child = scribbler(daemon);
  slot_of(child);
  daemon.child().kill(SIGSTOP);
  child.kill(SIGKILL);
  REQUIRE(child.wait().has_value());
  daemon.kill9();
  daemon.start();
  CHECK(counters(daemon).at("held_pages") == 0);
  CHECK(counters(daemon).at("resident_pages") == 0);
  CHECK(dump_findings(daemon.name()) == "");
}

TEST_CASE("a session in io_backend kernel ends with its daemon and attaches to the next one by itself") {
  TestDaemon daemon(kSmallPool);
  TestRank rank(daemon, "engine", 0, small_spec(Attention::mha, 1), true, IoBackend::kernel);
  const auto hashes = prompt(3, 10);
  REQUIRE(write_prompt(rank, 1, hashes) == 10);
  for (std::uint64_t life = 0; life < 3; ++life) {
    daemon.kill9();
    REQUIRE(eventually([&] { return rank.session().state() != Status::ok; }));
    daemon.start();
    REQUIRE(eventually([&] { return rank.session().state() == Status::ok; }));
    const ReadBack read = read_back(rank, 1, hashes);
    CHECK(read.hits == 10);
    CHECK(read.wrong == 0);
    CHECK(write_prompt(rank, 2, prompt(100 + static_cast<std::uint32_t>(life), 10)) == 10);
  }
}

TEST_CASE("kernel-mode ranks killed at any moment, and daemons too: never a wrong byte") {
  std::mt19937 random(20261201);
  TestDaemon daemon(kSmallPool);
  const auto spec = small_spec(Attention::mha, 2);
  for (std::uint32_t round = 0; round < 12; ++round) {
    std::vector<Child> ranks;
    for (std::uint32_t r = 0; r < 2; ++r) {
      ranks.push_back(Child::run([&, r] {
        TestRank rank(daemon, "engine", r, spec, false, IoBackend::kernel);
        std::printf("attached\n");
        std::fflush(stdout);
        for (std::uint64_t sequence = 1;; ++sequence) {
          const auto hashes = prompt(static_cast<std::uint32_t>(sequence % 7 + 1), 12);
          const auto reserved = rank.run(rank.session().reserve(sequence, hashes));
          if (reserved.status == Status::again) {
            --sequence;
            continue;
          }
          if (reserved.status != Status::ok) return 0;  // the other rank or the daemon died first
          const auto pages = TestRank::pages(0, 12);
          const std::span<const DevicePage> all(pages);
          for (const DevicePage page : pages) rank.spoil(page);
          if (reserved.hits > 0) {
            if (rank.run(rank.session().load(reserved.lease, 0, all.first(reserved.hits))).status !=
                Status::ok)
              return 0;
            for (std::uint32_t i = 0; i < reserved.hits; ++i) {
              if (!rank.holds(pages[i], hashes[i])) return 7;
            }
          }
          for (std::uint32_t i = reserved.hits; i < 12; ++i) rank.fill(pages[i], hashes[i]);
          if (reserved.hits < 12) {
            rank.run(rank.session().write(reserved.lease, reserved.hits, all.subspan(reserved.hits)));
          }
          rank.run(rank.session().release(reserved.lease));
        }
      }));
    }
    for (Child& rank : ranks) REQUIRE(rank.read_line() == "attached");
    ::usleep(static_cast<useconds_t>(50'000 + random() % 100'000));
    if (round % 3 == 2) {
      daemon.kill9();
      daemon.start();
    }
    Child& victim = ranks[random() % 2];
    victim.kill(SIGKILL);
    for (Child& rank : ranks) {
      const auto status = rank.wait();
      REQUIRE(status.has_value());
      CHECK((status->signal == SIGKILL || status->code == 0));
    }
    REQUIRE(eventually([&] {
      const auto now = counters(daemon);
      return now.at("attached_clients") == 0 && now.at("held_pages") == 0 &&
             now.at("resident_pages") == now.at("ready_pages");
    }));
    CHECK(dump_findings(daemon.name()) == "");
  }
}

}  // namespace hicache::test
