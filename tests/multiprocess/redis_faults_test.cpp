// The redis backend when its server dies, comes back, is full, is slow, or was never there.
#include <csignal>

#include "daemon/storage/redis/page_operation.hpp"
#include "tests/support/backend_rig.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/redis_server.hpp"

using namespace hicache;
using namespace hicache::test;
using daemon::StorageOperation;
using Json = nlohmann::ordered_json;

namespace {

Json settings_for(const std::string& endpoint, const Json& more = Json::object()) {
  Json settings = {{"endpoints", {endpoint}}, {"response_timeout_ms", 300}, {"reconnect_max_ms", 200}};
  settings.update(more);
  return settings;
}

std::vector<Status> all(std::size_t count, Status status) {
  return std::vector<Status>(count, status);
}

bool says(BackendRig& rig, const std::string& text) {
  return rig.backend().health().text.find(text) != std::string::npos;
}

#define NEED_REDIS()                                \
  if (!RedisServer::available()) {                  \
    WARN("SKIPPED: redis-server is not installed"); \
    return;                                         \
  }

}  // namespace

TEST_CASE("redis: a server that is not there fails pages at once, and is used when it comes") {
  NEED_REDIS();
  RedisServer server;
  server.kill9();
  BackendRig rig;
  rig.attach("redis", settings_for(GENERATE(0, 1) == 0 ? server.tcp() : server.unix_socket()));
  CHECK(rig.get(0, 100) == all(100, Status::system_error));
  CHECK_FALSE(rig.backend().health().usable);
  CHECK(says(rig, "connect: "));
  CHECK(rig.backend().stats().failed_operations == 100);
  // What can't be cleared is not said to be.
  CHECK_FALSE(rig.backend().clear());
  server.start();
  CHECK(eventually([&] { return rig.backend().health().usable; }));
  rig.fill(0);
  CHECK(rig.put(0, 1) == all(1, Status::ok));
  CHECK(rig.get(0, 1) == all(1, Status::ok));
  CHECK_FALSE(says(rig, "connect: "));
}

TEST_CASE("redis: a server killed among running batches loses pages, no batch, and is used when it is back") {
  NEED_REDIS();
  RedisServer server;
  BackendRig rig(BackendRig::spec_of(200), 128);
  rig.attach("redis", settings_for(server.tcp(), {{"threads", 2}}));
  for (std::uint32_t n = 0; n < 128; ++n) rig.fill(n);
  REQUIRE(rig.put(0, 128) == all(128, Status::ok));
  for (int round = 0; round < 3; ++round) {
    std::vector<daemon::StorageBatchId> batches;
    for (int i = 0; i < 20; ++i) {
      batches.push_back(rig.submit(StorageOperation::get, 0, 64));
      batches.push_back(rig.submit(StorageOperation::put, 64, 64));
    }
    // Somewhere in the middle.
    rig.sink().outcomes(batches[static_cast<std::size_t>(4 + 4 * round)]);
    server.kill9();
    for (const auto& batch : batches) {
      const auto outcomes = rig.sink().outcomes(batch);
      REQUIRE(outcomes);
      REQUIRE(outcomes->size() == 64);
      for (const Status outcome : *outcomes) {
        CHECK((outcome == Status::ok || outcome == Status::system_error || outcome == Status::timed_out));
      }
    }
    CHECK(eventually([&] { return !rig.backend().health().usable; }));
    CHECK(rig.get(0, 10) == all(10, Status::system_error));
    server.start();
    CHECK(eventually([&] { return rig.backend().health().usable; }));
    CHECK(rig.exists(0, 10) == all(10, Status::not_found));  // it came back empty
    for (std::uint32_t n = 0; n < 128; ++n) rig.fill(n);
    CHECK(rig.put(0, 128) == all(128, Status::ok));
  }
  rig.wipe();
  CHECK(rig.get(0, 128) == all(128, Status::ok));
  for (std::uint32_t n = 0; n < 128; ++n) CHECK(rig.holds(n, n));
  CHECK(rig.sink().breaches().empty());
}

TEST_CASE("redis: a full server keeps what it has and says no_space") {
  NEED_REDIS();
  const RedisServer server({"--maxmemory", "8mb", "--maxmemory-policy", "noeviction"});
  BackendRig rig(BackendRig::spec_of(100), 128);  // 200 KiB a page
  rig.attach("redis", settings_for(server.tcp(), {{"connections", 1}}));
  for (std::uint32_t n = 0; n < 128; ++n) rig.fill(n);
  const auto outcomes = rig.put(0, 128);
  REQUIRE(outcomes.size() == 128);
  CHECK(outcomes.front() == Status::ok);
  CHECK(outcomes.back() == Status::no_space);
  for (const Status outcome : outcomes) CHECK((outcome == Status::ok || outcome == Status::no_space));
  CHECK(says(rig, "OOM"));
  CHECK(rig.backend().health().usable);
  rig.wipe();
  CHECK(rig.get(0, 1) == all(1, Status::ok));
  CHECK(rig.holds(0, 0));
  // Room again: the state is forgotten.
  rig.fill(127);
  CHECK(eventually([&] {
    server.ask({"FLUSHALL"});
    return rig.put(127, 1) == all(1, Status::ok) && !says(rig, "OOM");
  }));
}

TEST_CASE("redis: a server that evicts makes pages vanish, and those that stay are right") {
  NEED_REDIS();
  const RedisServer server({"--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru"});
  BackendRig rig(BackendRig::spec_of(100), 128);
  rig.attach("redis", settings_for(server.tcp()));
  for (std::uint32_t n = 0; n < 128; ++n) rig.fill(n);
  CHECK(rig.put(0, 128) == all(128, Status::ok));
  rig.wipe();
  std::size_t there = 0;
  const auto outcomes = rig.get(0, 128);
  for (std::uint32_t n = 0; n < 128; ++n) {
    CHECK((outcomes[n] == Status::ok ? rig.holds(n, n) : rig.untouched(n, 1)));
    if (outcomes[n] == Status::ok) ++there;
  }
  CHECK(there > 0);
  CHECK(there < 128);
}

TEST_CASE("redis: a server that does not answer ends pages with timed_out, then at once, and is used again") {
  NEED_REDIS();
  const RedisServer server;
  BackendRig rig;
  rig.attach("redis", settings_for(server.tcp(), {{"connect_timeout_ms", 200}}));
  rig.fill(0);
  REQUIRE(rig.put(0, 1) == all(1, Status::ok));
  server.signal(SIGSTOP);
  const auto outcomes = rig.get(0, 1);
  CHECK(outcomes == all(1, Status::timed_out));
  CHECK(eventually([&] { return !rig.backend().health().usable; }));
  CHECK(says(rig, "no answer in time"));
  CHECK(rig.get(0, 1) == all(1, Status::system_error));
  server.signal(SIGCONT);
  CHECK(eventually([&] { return rig.backend().health().usable; }));
  rig.wipe();
  CHECK(eventually([&] { return rig.get(0, 1) == all(1, Status::ok); }));
  CHECK(rig.holds(0, 0));
  CHECK(rig.sink().breaches().empty());
}

TEST_CASE("redis: a server that sleeps shorter than the response time delays pages, nothing more") {
  NEED_REDIS();
  const RedisServer server({"--enable-debug-command", "yes"});
  BackendRig rig;
  rig.attach("redis", settings_for(server.tcp(), {{"response_timeout_ms", 60000}}));
  rig.fill(0);
  REQUIRE(rig.put(0, 1) == all(1, Status::ok));
  std::thread sleeper([&] { server.ask({"DEBUG", "SLEEP", "0.5"}); });
  for (int i = 0; i < 5; ++i) {
    CHECK(rig.get(0, 1) == all(1, Status::ok));
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  sleeper.join();
  CHECK(rig.backend().health().usable);
}

TEST_CASE("redis: a huge value under a page's key is corrupt and dropped, although it takes long to come") {
  NEED_REDIS();
  const RedisServer server;
  BackendRig rig;
  rig.attach("redis", settings_for(server.tcp(), {{"connections", 1}, {"response_timeout_ms", 20000}}));
  const std::string key = daemon::redis::page_key("hicache", rig.ns(), BackendRig::hash(0));
  server.ask({"SETRANGE", key, "300000000", "x"});
  CHECK(rig.get(0, 1) == all(1, Status::corrupt));
  CHECK(server.ask({"EXISTS", key}) == "0");
  CHECK(rig.untouched(0, 128));
}

TEST_CASE("redis: connections that the server closes are made again") {
  NEED_REDIS();
  const RedisServer server;
  BackendRig rig;
  rig.attach("redis", settings_for(server.tcp()));
  rig.fill(0);
  REQUIRE(rig.put(0, 1) == all(1, Status::ok));
  for (int i = 0; i < 5; ++i) {
    server.ask({"CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"});
    CHECK(eventually([&] { return rig.get(0, 1) == all(1, Status::ok); }));
  }
  CHECK(rig.sink().breaches().empty());
}

TEST_CASE("redis: wrong settings are refused with the key, and passwords are not repeated") {
  BackendRig rig;
  const auto refusal = [&](const Json& settings) {
    const auto made = daemon::make_storage_backend("redis", settings, rig.pool(), rig.sink());
    return made ? std::string("accepted") : made.error().message;
  };
  const auto names = [&](const Json& settings, const std::string& text) {
    const std::string message = refusal(settings);
    INFO(message);
    CHECK(message.starts_with("Failed to create storage backend: storage.redis."));
    CHECK(message.find(text) != std::string::npos);
    CHECK(message.find("secret") == std::string::npos);
  };
  names({{"endpoint", "x"}}, "storage.redis.endpoint: unknown key, expected one of endpoints, ");
  names({{"passwort", "secret"}}, "storage.redis.passwort: unknown key");
  names({{"password", Json::array({"secret"})}}, "storage.redis.password: expected a text");
  names({{"password", "secret"}, {"password_file", "/dev/null"}}, "storage.redis.password_file");
  names({{"password_file", "/does/not/exist"}}, "can't read a line from /does/not/exist");
  names({{"user", "cache"}}, "storage.redis.user: found \"cache\" without a password");
  names({{"endpoints", Json::array()}}, "storage.redis.endpoints: found []");
  names({{"endpoints", {"localhost"}}}, "found \"localhost\": expected \"host:port\"");
  names({{"endpoints", {"localhost:0"}}}, "expected a port from 1 to 65535");
  names({{"endpoints", {"localhost:65536"}}}, "expected a port");
  names({{"endpoints", {"::1:6379"}}}, "in brackets");
  names({{"endpoints", {"unix:redis.sock"}}}, "an absolute path");
  names({{"endpoints", {"unix:/" + std::string(200, 'x')}}}, "at most 107 bytes");
  names({{"endpoints", {"host.invalid:6379"}}}, "the host can't be resolved");
  names({{"endpoints", {"127.0.0.1:1", "127.0.0.1:2"}}},
        "found 2 servers, expected 1 unless cluster is true");
  names({{"endpoints", {"unix:/run/redis.sock"}}, {"cluster", true}}, "reached over TCP");
  names({{"cluster", true}, {"database", 1}}, "a cluster has only database 0");
  names({{"connections", 2}, {"threads", 4}},
        "storage.redis.connections: found 2, expected at least threads (4)");
  names({{"depth", 0}}, "storage.redis.depth: found 0, expected an integer from 1 to 128");
  names({{"key_prefix", "a{b}"}}, "storage.redis.key_prefix: found \"a{b}\"");
  names({{"ttl_s", -1}}, "storage.redis.ttl_s: found -1");
}
