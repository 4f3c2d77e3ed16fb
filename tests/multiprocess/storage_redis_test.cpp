// Two daemons that share a Redis server: what one's engine has written, the other's loads. And what a server
// that dies, spoils values or asks for a password does to a daemon.
#include <csignal>

#include "tests/support/redis_server.hpp"
#include "tests/support/storage_daemon.hpp"

namespace hicache::test {
namespace {

constexpr std::uint32_t kPages = 40;

// A short circuit breaker, so that a server that is back is found soon.
std::string on(const std::string& endpoint, const nlohmann::json& more = nlohmann::json::object()) {
  nlohmann::json storage = {{"backend", "redis"},
                            {"breaker_suspend_ms", 100},
                            {"redis", {{"endpoints", {endpoint}}, {"reconnect_max_ms", 100}}}};
  storage["redis"].merge_patch(more);
  return storage.dump();
}

OperationResult prefetch(TestRank& rank, std::uint64_t sequence, const std::vector<PrefixHash>& hashes,
                         bool* right = nullptr) {
  const auto reserved = rank.run(rank.session().reserve(sequence, hashes));
  REQUIRE(reserved.status == Status::ok);
  const auto count = static_cast<std::uint32_t>(hashes.size());
  const auto result =
      rank.run(rank.session().prefetch(reserved.lease, 0, count, PrefetchPolicy::wait_complete));
  if (right != nullptr)
    *right = result.written > 0 && loads_right(rank, reserved.lease, hashes, result.written);
  REQUIRE(rank.run(rank.session().release(reserved.lease)).status == Status::ok);
  return result;
}

}  // namespace

TEST_CASE("redis: what the engine of one daemon wrote, the engine of another one hits, byte for byte") {
  if (!RedisServer::available()) {
    WARN("SKIPPED: redis-server is not installed");
    return;
  }
  RedisServer server;
  StorageDaemon writer(on(server.tcp()));
  StorageDaemon reader(on(server.unix_socket()));
  TestRank write_rank(writer.daemon(), "engine", 0, small_spec(Attention::mha, 1));
  TestRank read_rank(reader.daemon(), "another engine", 0, small_spec(Attention::mha, 1));
  const auto hashes = prompt(1, kPages);
  REQUIRE(write_prompt(write_rank, 1, hashes) == kPages);
  writer.sync();
  CHECK(writer.counter("backed_up") == kPages);
  CHECK(server.ask({"DBSIZE"}) == std::to_string(kPages));

  bool right = false;
  const auto result = prefetch(read_rank, 1, hashes, &right);
  CHECK(result.status == Status::ok);
  CHECK(result.hits == kPages);
  CHECK(result.written == kPages);
  CHECK(right);
  CHECK(reader.counter("written") == 0);

  SECTION("a page whose value was spoilt ends the prefix there, and is gone") {
    reader.empty_pool();
    const std::string spoilt =
        "hicache:" + to_hex(small_spec(Attention::mha, 1).digest()) + ":" + to_hex(hashes[7]);
    REQUIRE(server.ask({"SETRANGE", spoilt, "200", "!"}) != "0");
    CHECK(prefetch(read_rank, 2, hashes, &right).written == 7);
    CHECK(right);
    CHECK(reader.counter("storage_corrupt") == 1);
    CHECK(server.ask({"EXISTS", spoilt}) == "0");
    reader.require_clean();
    writer.require_clean();
  }

  SECTION("the server is killed and comes back empty: misses, and then it is used again") {
    reader.empty_pool();
    server.kill9();
    CHECK(prefetch(read_rank, 2, hashes).written == 0);
    CHECK(eventually([&] {
      return reader.ask({"storage", "status"}).dump().find("not connected") != std::string::npos;
    }));
    // The engine goes on without it.
    REQUIRE(write_prompt(read_rank, 3, hashes) == kPages);
    server.start();
    std::uint64_t sequence = 3;
    CHECK(eventually([&] {
      const auto more = prompt(static_cast<std::uint32_t>(100 + sequence), 4);
      REQUIRE(write_prompt(read_rank, ++sequence, more) == 4);
      reader.sync();
      return server.ask({"DBSIZE"}) != "0";
    }));
    reader.require_clean();
  }
}

TEST_CASE(
    "redis: values that take longer than the response time are misses, and storage is suspended until then") {
  if (!RedisServer::available()) {
    WARN("SKIPPED: redis-server is not installed");
    return;
  }
  RedisServer server;
  StorageDaemon rig(on(server.tcp(), {{"response_timeout_ms", 50}}));
  TestRank rank(rig.daemon(), "engine", 0, small_spec(Attention::mha, 1));
  const auto hashes = prompt(1, kPages);
  rig.store(rank, 1, hashes);
  REQUIRE(server.ask({"DBSIZE"}) == std::to_string(kPages));
  server.signal(SIGSTOP);
  std::uint64_t sequence = 1;
  CHECK(eventually([&] {
    const auto late = prefetch(rank, ++sequence, hashes);
    CHECK((late.status == Status::ok && late.written == 0));
    return rig.counter("storage_suspensions") >= 1;
  }));
  // What is computed meanwhile is cached as ever.
  REQUIRE(write_prompt(rank, ++sequence, prompt(2, 4)) == 4);
  server.signal(SIGCONT);
  bool right = false;
  CHECK(eventually([&] { return prefetch(rank, ++sequence, hashes, &right).written == kPages; }));
  CHECK(right);
  rig.require_clean();
}

TEST_CASE("redis: no password is in what a daemon shows") {
  if (!RedisServer::available()) {
    WARN("SKIPPED: redis-server is not installed");
    return;
  }
  const std::string secret = "correct-horse-battery-staple";
  const RedisServer server({"--requirepass", secret});
  const bool good = GENERATE(true, false);
  StorageDaemon rig(on(server.tcp(), {{"password", good ? secret : "wrong-" + secret}}));
  TestRank rank(rig.daemon(), "engine", 0, small_spec(Attention::mha, 1));
  const auto hashes = prompt(1, 4);
  REQUIRE(write_prompt(rank, 1, hashes) == 4);
  rig.sync();
  CHECK(RedisClient(server.port()).ask({"AUTH", secret}) == "OK");
  CHECK(rig.counter("backed_up") == (good ? 4 : 0));
  std::string shown;
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{"status"}, {"config"}, {"storage", "status"}}) {
    shown += rig.ask(words).dump();
  }
  CHECK(shown.find("127.0.0.1") != std::string::npos);
  if (!good) CHECK(shown.find("WRONGPASS") != std::string::npos);
  for (const char* option : {"--json", "--metrics"}) {
    const auto run = run_program({program("hicache-dump"), rig.daemon().name(), option});
    CHECK(run.status.exited_with(0));
    shown += run.out + run.err;
  }
  shown += rig.daemon().log();
  CHECK(shown.find(secret) == std::string::npos);
}

}  // namespace hicache::test
