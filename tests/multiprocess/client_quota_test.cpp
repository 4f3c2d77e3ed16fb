// Quotas of one client: operations in flight, and what they name in its arena. Who meets one hears `again`,
// and nobody else hears of it.
#include <csignal>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "shm/unix_socket.hpp"
#include "tests/crash/crash_rig.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/raw_rank.hpp"

using namespace hicache;
using namespace hicache::test;

namespace {

const NamespaceSpec kSpec = small_spec(Attention::mha, 1);
constexpr std::uint32_t kListOffset = 2048;  // of device pages; hashes lie before it

nlohmann::json ask(const TestDaemon& daemon, const std::string& question) {
  return nlohmann::json::parse(TestRank::take(control(daemon.socket_path(), {question}, kPatienceMs)));
}
std::uint64_t counter(const TestDaemon& daemon, const std::string& name) {
  return ask(daemon, "status").at("counters").at(name).get<std::uint64_t>();
}
std::uint64_t over_quota(const TestDaemon& daemon, const std::string& engine) {
  const nlohmann::json answer = ask(daemon, "ranks");
  for (const auto& rank : answer.at("ranks")) {
    if (rank.at("engine") == engine) return rank.at("over_quota").get<std::uint64_t>();
  }
  throw std::runtime_error("no rank of " + engine);
}

// Opens leases on prompts of their own and posts writes that wait for a fence which the rank has not raised:
// they stay open.
class Writer {
 public:
  explicit Writer(RawRank& rank) : rank_(rank) {}

  void post(std::uint32_t pages) {
    ++sequence_;
    const auto hashes = prompt(static_cast<std::uint32_t>(sequence_), pages);
    const auto reserved = rank_.run(rank_.reserve(sequence_, hashes));
    if (reserved.status != Status::ok) throw std::runtime_error("no lease");
    Submission write = rank_.transfer(Opcode::write, reserved.lease, 0, pages, kListOffset);
    write.fence = 0;
    write.fence_value = 1;
    write.deadline_ms = 600'000;
    if (!rank_.post(write)) throw std::runtime_error("the ring is full");
  }
  void raise_fence() {
    rank_.fences().write[0].value.store(1, std::memory_order_release);
    rank_.kick();
  }

 private:
  RawRank& rank_;
  std::uint64_t sequence_ = 0;
};

// Completions until there are `count`.
std::vector<Completion> take(RawRank& rank, std::size_t count) {
  std::vector<Completion> out;
  while (out.size() < count) out.push_back(rank.wait());
  return out;
}

}  // namespace

TEST_CASE("a client with too many open operations hears again until some have ended, and nobody else does") {
  TestDaemon daemon(R"({"limits": {"operations_per_client": 4}})");
  RawRank greedy(daemon, "greedy", 0, kSpec);
  Writer writer(greedy);
  // A reserve is an operation too, and ends at once: with three writes open it is the fourth.
  for (int i = 0; i < 3; ++i) writer.post(2);
  CHECK(counter(daemon, "quota_operations") == 0);
  writer.post(2);
  const auto refused = greedy.run(greedy.reserve(100, prompt(100, 2)));
  CHECK(refused.status == Status::again);
  CHECK(counter(daemon, "quota_operations") == 1);
  CHECK(over_quota(daemon, "greedy") == 1);
  // What gives back is never refused.
  Submission nothing;
  nothing.opcode = Opcode::nop;
  CHECK(greedy.run(nothing).status == Status::ok);

  TestRank modest(daemon, "modest", 0, kSpec);
  const auto hashes = prompt(200, 8);
  CHECK(write_prompt(modest, 1, hashes) == 8);
  const ReadBack read = read_back(modest, 2, hashes);
  CHECK(read.hits == 8);
  CHECK(read.wrong == 0);
  CHECK(over_quota(daemon, "modest") == 0);

  writer.raise_fence();
  for (const Completion& c : take(greedy, 4)) CHECK(c.status == Status::ok);
  CHECK(greedy.run(greedy.reserve(100, prompt(100, 2))).status == Status::ok);
  const auto dump = run_program({program("hicache-dump"), daemon.name(), "--metrics"});
  CHECK(dump.out.find("hicache_client_over_quota_total{") != std::string::npos);
  CHECK(dump_findings(daemon.name()) == "");
}

TEST_CASE("naming the same bytes of the arena again and again counts each time") {
  // Room for 8 lists of 64 pages; a channel never has less than a page of arena.
  TestDaemon daemon(R"({"limits": {"arena_bytes": "8KiB", "arena_in_flight_bytes": "4KiB"}})");
  RawRank greedy(daemon, "greedy", 0, kSpec);
  Writer writer(greedy);
  // 64 hashes of 32 bytes and 64 pages of 8 bytes: a reserve needs 2 KiB of the 4 KiB while it is decided.
  for (int i = 0; i < 4; ++i) writer.post(64);
  CHECK(counter(daemon, "quota_arena") == 0);
  // Four writes name 2 KiB: a reserve of 64 hashes just fits, one of 65 does not.
  CHECK(greedy.run(greedy.reserve(100, prompt(100, 64))).status == Status::ok);
  CHECK(greedy.run(greedy.reserve(101, prompt(101, 65))).status == Status::again);
  // More than the quota as a whole can never pass.
  CHECK(greedy.run(greedy.reserve(102, prompt(102, 129))).status == Status::too_large);
  CHECK(counter(daemon, "quota_arena") == 2);
  CHECK(over_quota(daemon, "greedy") == 2);
  writer.raise_fence();
  for (const Completion& c : take(greedy, 4)) CHECK(c.status == Status::ok);
  CHECK(greedy.run(greedy.reserve(101, prompt(101, 65))).status == Status::ok);
  CHECK(dump_findings(daemon.name()) == "");
}

TEST_CASE("a client that floods its ring meets its quota while another one works as if alone") {
  TestDaemon daemon(R"({"limits": {"operations_per_client": 2}})");
  Child flooder = Child::run([&]() -> int {
    RawRank rank(daemon, "flooder", 0, kSpec);
    Writer writer(rank);
    writer.post(1);
    writer.post(1);  // nobody raises their fence: from now on everything is refused
    std::printf("flooding\n");
    std::fflush(stdout);
    const Submission reserve = rank.reserve(50, prompt(50, 1));
    for (;;) {
      static_cast<void>(rank.post(reserve));
      while (const auto completion = rank.next()) {
        if (completion->status != Status::again) return 1;
      }
    }
  });
  REQUIRE(flooder.read_line() == "flooding");
  TestRank modest(daemon, "modest", 0, kSpec);
  for (std::uint32_t i = 0; i < 200; ++i) {
    const auto hashes = prompt(1000 + i, 4);
    REQUIRE(write_prompt(modest, 2 * i + 1, hashes) == 4);
    const ReadBack read = read_back(modest, 2 * i + 2, hashes);
    REQUIRE(read.hits == 4);
    REQUIRE(read.wrong == 0);
  }
  CHECK(eventually([&] { return over_quota(daemon, "flooder") > 1000; }));
  CHECK(over_quota(daemon, "modest") == 0);
  flooder.kill(SIGKILL);
  REQUIRE(flooder.wait().has_value());
  CHECK(eventually([&] { return counter(daemon, "attached_clients") == 1; }));
  CHECK(dump_findings(daemon.name()) == "");
}
