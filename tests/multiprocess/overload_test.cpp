// A heavy engine beside a light one: what the heavy one can take is bounded, and the light one gets its
// share.
#include <nlohmann/json.hpp>

#include "shm/unix_socket.hpp"
#include "tests/crash/crash_rig.hpp"
#include "tests/crash/stepping/local_rank.hpp"
#include "tests/support/catch.hpp"

using namespace hicache;
using namespace hicache::test;

namespace {

const NamespaceSpec kSpec = small_spec(Attention::mha, 1);

std::uint64_t counter(const TestDaemon& daemon, const std::string& name) {
  return nlohmann::json::parse(*control(daemon.socket_path(), {"status"}))
      .at("counters")
      .at(name)
      .get<std::uint64_t>();
}

// Reserves a new prompt of `count` pages and writes it, and keeps the lease. Returns the pages written.
std::uint32_t hold_prompt(TestRank& rank, std::uint64_t sequence, std::uint32_t id, std::uint32_t count,
                          LeaseId* lease = nullptr) {
  const auto hashes = prompt(id, count);
  const auto reserved = rank.run(rank.session().reserve(sequence, hashes));
  REQUIRE(reserved.status == Status::ok);
  const auto pages = TestRank::pages(0, count);
  for (std::uint32_t i = 0; i < count; ++i) rank.fill(pages[i], hashes[i]);
  if (lease != nullptr) *lease = reserved.lease;
  return rank.run(rank.session().write(reserved.lease, reserved.hits, pages)).written;
}

}  // namespace

TEST_CASE("a heavy engine that pins all it can get leaves the light one its guaranteed share") {
  // 64 pages; half of them are guaranteed, 16 to each of two engines.
  TestDaemon daemon(
      R"({"pool": {"bytes": "256KiB", "segment_bytes": "64KiB", "max_pages": 64}, "eviction": {"high_watermark": 0}})");
  TestRank light(daemon, "light", 0, kSpec);
  TestRank heavy(daemon, "heavy", 0, kSpec);
  std::uint32_t held = 0;
  for (std::uint32_t i = 0; i < 10; ++i) held += hold_prompt(heavy, i + 1, i, 8);
  CHECK(held == 48);
  CHECK(counter(daemon, "quota_pages") > 0);

  // The light one gets what it is sure of, and no more than there is.
  LeaseId lease;
  CHECK(hold_prompt(light, 1, 100, 16, &lease) == 16);
  CHECK(hold_prompt(light, 2, 101, 4) == 0);
  const auto ranks = nlohmann::json::parse(*control(daemon.socket_path(), {"ranks"})).at("ranks");
  for (const auto& rank : ranks) {
    CHECK(rank.at("group_pinned_bytes") == (rank.at("engine") == "light" ? 16 : 48) * 4096);
  }
  // Its pages stay its own while it does not hold them: the heavy one may evict, but not pin that much.
  CHECK(light.run(light.session().release(lease)).status == Status::ok);
  CHECK(hold_prompt(heavy, 11, 50, 8) == 0);
  CHECK(hold_prompt(light, 3, 102, 16) == 16);
  CHECK(dump_findings(daemon.name()) == "");

  // Alone it may have everything.
  light.detach();
  CHECK(eventually([&] { return counter(daemon, "attached_clients") == 1; }));
  CHECK(hold_prompt(heavy, 12, 60, 16) == 16);
}

TEST_CASE("pages that several engines pin count once") {
  TestDaemon daemon(
      R"({"pool": {"bytes": "256KiB", "segment_bytes": "64KiB", "max_pages": 64}, "eviction": {"high_watermark": 0}})");
  TestRank first(daemon, "first", 0, kSpec);
  TestRank second(daemon, "second", 0, kSpec);
  CHECK(hold_prompt(first, 1, 1, 40) == 40);
  for (std::uint64_t sequence = 1; sequence <= 20; ++sequence) {
    const auto again = second.run(second.session().reserve(sequence, prompt(1, 40)));
    CHECK(again.hits == 40);
  }
  CHECK(hold_prompt(second, 21, 2, 16) == 16);
}

TEST_CASE("a heavy engine meets its limit of leases, and the light one does not") {
  TestDaemon daemon(R"({"limits": {"leases_per_group": 5}})");
  TestRank heavy(daemon, "heavy", 0, kSpec);
  TestRank light(daemon, "light", 0, kSpec);
  for (std::uint64_t sequence = 1; sequence <= 5; ++sequence)
    CHECK(heavy.run(heavy.session().reserve(sequence, prompt(1, 2))).status == Status::ok);
  CHECK(heavy.run(heavy.session().reserve(6, prompt(1, 2))).status == Status::again);
  CHECK(light.run(light.session().reserve(1, prompt(1, 2))).status == Status::ok);
  CHECK(counter(daemon, "quota_leases") == 1);
}

TEST_CASE("a process that opens connection after connection keeps nobody else out") {
  TestDaemon daemon(R"({"socket": {"max_connections": 40, "max_connections_per_process": 10},
                        "limits": {"hello_deadline_ms": 60000}})");
  Child greedy = Child::run([&] {
    std::vector<UniqueFd> sockets;
    int refused = 0;
    for (int i = 0; i < 60; ++i) {
      auto socket = connect_unix(daemon.socket_path());
      if (!socket) continue;
      static_cast<void>(send_message(socket->get(), encode_message(Control{{"status"}}), {}, 1000));
      const auto answer = receive_message(socket->get(), kPatienceMs);
      const auto decoded = answer ? decode_message(answer->bytes) : decode_message({});
      const auto* reply = decoded ? std::get_if<Reply>(&*decoded) : nullptr;
      if (reply == nullptr || reply->text.find("socket.max_connections_per_process") != std::string::npos)
        ++refused;
      sockets.push_back(std::move(*socket));
    }
    std::printf("%d\n", refused);
    std::fflush(stdout);
    ::pause();
    return 0;
  });
  const auto line = greedy.read_line();
  REQUIRE(line.has_value());
  CHECK(std::stoi(*line) == 50);
  TestRank rank(daemon, "engine", 0, kSpec);
  CHECK(write_prompt(rank, 1, prompt(1, 4)) == 4);
  CHECK(counter(daemon, "connections_refused") >= 50);
}

TEST_CASE(
    "a light client's entry waits for one turn of a client that keeps its ring full, not for the ring") {
  TestDaemon named(kSmallDaemon);
  named.write_config(R"({"limits": {"submission_entries": 64, "completion_entries": 256}})");
  REQUIRE(named.stop() == 0);
  const auto config = daemon::load_config(named.config_path());
  REQUIRE(config.ok());
  DaemonInside daemon(*config, daemon::RegionOwner::Start::fresh);
  auto other_spec = kSpec;
  other_spec.model = "light-model";
  LocalRank heavy(*config, kSpec, 0);
  LocalRank light(*config, other_spec, 0);
  for (LocalRank* rank : {&heavy, &light}) {
    rank->post_attach(daemon);
    daemon.settle();
    rank->post_buffers(daemon);
  }
  daemon.settle();
  for (int i = 0; i < 64; ++i) heavy.post_release(1);
  light.post_reserve(1, prompt(1, 1));
  const std::uint64_t before = daemon.tables().header->operation_sequence.load();
  REQUIRE(daemon.coordinator().turn());
  CHECK(light.next().operation_sequence - before <= 17);
  CHECK(daemon.tables().header->operation_sequence.load() - before == 17);
}
