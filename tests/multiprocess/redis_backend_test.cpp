// The redis backend against a real redis-server: the contract of daemon/storage/backend.hpp, sharing, and
// wrong values.
#include <csignal>
#include <fstream>

#include "daemon/storage/redis/page_operation.hpp"
#include "daemon/storage/redis/record.hpp"
#include "tests/support/backend_rig.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/redis_server.hpp"

using namespace hicache;
using namespace hicache::test;
using daemon::StorageOperation;
using Json = nlohmann::ordered_json;

namespace {

constexpr std::uint64_t kMsNs = 1'000'000;

Json settings_for(const std::string& endpoint, const Json& more = Json::object()) {
  Json settings = {{"endpoints", {endpoint}}};
  settings.update(more);
  return settings;
}

std::string key_of(const BackendRig& rig, std::uint32_t page) {
  return daemon::redis::page_key("hicache", rig.ns(), BackendRig::hash(page));
}

std::vector<Status> all(std::size_t count, Status status) {
  return std::vector<Status>(count, status);
}

#define NEED_REDIS()                                \
  if (!RedisServer::available()) {                  \
    WARN("SKIPPED: redis-server is not installed"); \
    return;                                         \
  }

}  // namespace

TEST_CASE("redis: pages that were put are found and come back byte for byte, over TCP and a Unix socket") {
  NEED_REDIS();
  const RedisServer server;
  const std::string endpoint = GENERATE(0, 1) == 0 ? server.tcp() : server.unix_socket();
  const auto threads = GENERATE(1u, 3u);
  INFO(endpoint << " with " << threads << " threads");
  BackendRig rig;
  rig.attach("redis", settings_for(endpoint, {{"threads", threads}}));

  CHECK(rig.exists(0, 100) == all(100, Status::not_found));
  CHECK(rig.get(0, 3) == all(3, Status::not_found));
  CHECK(rig.untouched(0, 128));
  for (std::uint32_t n = 0; n < 100; ++n) rig.fill(n);
  CHECK(rig.put(0, 100) == all(100, Status::ok));
  rig.wipe();
  CHECK(rig.get(0, 100) == all(100, Status::ok));
  for (std::uint32_t n = 0; n < 100; ++n) CHECK(rig.holds(n, n));
  CHECK(rig.untouched(100, 28));
  CHECK(rig.padding_intact());
  CHECK(server.ask({"DBSIZE"}) == "100");

  // exists and get say what is there page by page, whatever lies before it: the leading part is the caller's.
  server.ask({"DEL", key_of(rig, 2)});
  CHECK(rig.exists(0, 4) == std::vector{Status::ok, Status::ok, Status::not_found, Status::ok});
  rig.wipe();
  CHECK(rig.get(0, 4) == std::vector{Status::ok, Status::ok, Status::not_found, Status::ok});
  CHECK(rig.holds(3, 3));
  CHECK(rig.untouched(2, 1));
  CHECK(rig.backend().health().usable);
  CHECK(rig.sink().breaches().empty());
}

TEST_CASE("redis: large pages of several buffers, many connections, deep pipelines, mixed operations") {
  NEED_REDIS();
  const RedisServer server;
  BackendRig rig(BackendRig::spec_of(700), 64);  // 1.4 MiB a page
  rig.attach("redis", settings_for(server.tcp(), {{"connections", 8}, {"threads", 2}, {"depth", 16}}));
  for (std::uint32_t n = 0; n < 64; ++n) rig.fill(n);
  CHECK(rig.put(0, 32) == all(32, Status::ok));
  for (std::uint32_t n = 0; n < 32; ++n) {
    rig.fill(n, 1);
    CHECK_FALSE(rig.holds(n, n));
  }
  // Reads and writes at once.
  const auto read = rig.submit(StorageOperation::get, 0, 32);
  const auto write = rig.submit(StorageOperation::put, 32, 32);
  const auto look = rig.submit(StorageOperation::exists, 0, 32);
  CHECK(rig.sink().outcomes(read) == all(32, Status::ok));
  CHECK(rig.sink().outcomes(write) == all(32, Status::ok));
  CHECK(rig.sink().outcomes(look) == all(32, Status::ok));
  for (std::uint32_t n = 0; n < 32; ++n) CHECK(rig.holds(n, n));
  rig.wipe();
  CHECK(rig.get(0, 64) == all(64, Status::ok));
  for (std::uint32_t n = 0; n < 64; ++n) CHECK(rig.holds(n, n));
  CHECK(rig.padding_intact());
}

TEST_CASE(
    "redis: a page that is there is not written again, and pages expire when they have a time to live") {
  NEED_REDIS();
  const RedisServer server;
  BackendRig rig;
  rig.attach("redis", settings_for(server.tcp(), {{"ttl_s", 100}}));
  rig.fill(0);
  CHECK(rig.put(0, 1) == all(1, Status::ok));
  CHECK(std::stol(server.ask({"PTTL", key_of(rig, 0)})) > 50'000);

  server.ask({"PEXPIRE", key_of(rig, 0), "40000"});
  server.ask({"CONFIG", "RESETSTAT"});
  CHECK(rig.put(0, 1) == all(1, Status::ok));
  CHECK(server.ask({"INFO", "commandstats"}).find("cmdstat_set:") == std::string::npos);
  CHECK(std::stol(server.ask({"PTTL", key_of(rig, 0)})) > 50'000);

  server.ask({"PEXPIRE", key_of(rig, 0), "1"});
  CHECK(eventually([&] { return rig.exists(0, 1) == all(1, Status::not_found); }));
}

TEST_CASE("redis: namespaces, prefixes and databases keep their pages apart") {
  NEED_REDIS();
  const RedisServer server;
  BackendRig one;
  BackendRig other(BackendRig::spec_of(2, "other model"));
  BackendRig prefixed;
  BackendRig database;
  one.attach("redis", settings_for(server.tcp()));
  other.attach("redis", settings_for(server.tcp()));
  prefixed.attach("redis", settings_for(server.tcp(), {{"key_prefix", "site-2"}}));
  database.attach("redis", settings_for(server.tcp(), {{"database", 3}}));
  one.fill(0);
  CHECK(one.put(0, 1) == all(1, Status::ok));
  CHECK(other.exists(0, 1) == all(1, Status::not_found));
  CHECK(prefixed.exists(0, 1) == all(1, Status::not_found));
  CHECK(database.exists(0, 1) == all(1, Status::not_found));
  database.fill(0);
  CHECK(database.put(0, 1) == all(1, Status::ok));
  RedisClient client(server.port());
  client.ask({"SELECT", "3"});
  CHECK(client.ask({"DBSIZE"}) == "1");

  // clear takes the pages of its prefix and nothing else.
  server.ask({"SET", "somebody's", "value"});
  prefixed.fill(1);
  CHECK(prefixed.put(1, 1) == all(1, Status::ok));
  REQUIRE(one.backend().clear());
  CHECK(one.exists(0, 1) == all(1, Status::not_found));
  CHECK(eventually([&] { return server.ask({"DBSIZE"}) == "2"; }));
  CHECK(server.ask({"GET", "somebody's"}) == "value");
  CHECK(prefixed.exists(1, 1) == all(1, Status::ok));
  one.fill(0);
  CHECK(eventually([&] { return one.put(0, 1) == all(1, Status::ok); }));
  CHECK(one.get(0, 1) == all(1, Status::ok));
}

TEST_CASE("redis: what one backend wrote another one hits") {
  NEED_REDIS();
  const RedisServer server;
  BackendRig writer;
  BackendRig reader;
  writer.attach("redis", settings_for(server.tcp()));
  reader.attach("redis", settings_for(server.unix_socket()));
  for (std::uint32_t n = 0; n < 20; ++n) writer.fill(n);
  CHECK(writer.put(0, 20) == all(20, Status::ok));
  writer.detach();
  CHECK(reader.exists(0, 21).back() == Status::not_found);
  CHECK(reader.get(0, 20) == all(20, Status::ok));
  for (std::uint32_t n = 0; n < 20; ++n) CHECK(reader.holds(n, n));
}

TEST_CASE("redis: foreign, short, long, bit-flipped and swapped values are corrupt, and dropped") {
  NEED_REDIS();
  const RedisServer server;
  BackendRig rig;
  rig.attach("redis", settings_for(server.tcp(), {{"connections", 1}}));
  rig.fill(0);
  rig.fill(1);
  REQUIRE(rig.put(0, 2) == all(2, Status::ok));
  const std::string good = server.ask({"GET", key_of(rig, 0)});
  REQUIRE(good.size() == sizeof(daemon::redis::RecordHeader) + 4096);

  const auto flipped = [&](std::size_t at) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 4);
    return bad;
  };
  std::vector<std::pair<std::string, std::string>> values = {
      {"empty", ""},
      {"foreign", "not a page"},
      {"foreign, of the right length", std::string(good.size(), 'x')},
      {"truncated", good.substr(0, good.size() - 1)},
      {"only a header", good.substr(0, sizeof(daemon::redis::RecordHeader))},
      {"too long", good + "x"},
      {"much too long", std::string(3'000'000, '\n')},
      {"another page's", server.ask({"GET", key_of(rig, 1)})},
  };
  for (std::size_t at = 0; at < sizeof(daemon::redis::RecordHeader); at += 4) {
    values.emplace_back("flipped at " + std::to_string(at), flipped(at));
  }
  for (const std::size_t at : {std::size_t{112}, std::size_t{2000}, good.size() - 1}) {
    values.emplace_back("flipped at " + std::to_string(at), flipped(at));
  }
  std::uint64_t corrupt = 0;
  for (const auto& [what, value] : values) {
    INFO(what);
    REQUIRE(server.ask({"SET", key_of(rig, 0), value}) == "OK");
    rig.wipe();
    CHECK(rig.get(0, 2) == std::vector{Status::corrupt, Status::ok});
    CHECK(rig.holds(1, 1));
    CHECK(rig.untouched(2, 126));
    CHECK(rig.padding_intact());
    CHECK(server.ask({"EXISTS", key_of(rig, 0)}) == "0");
    CHECK(rig.get(0, 1) == all(1, Status::not_found));
    CHECK(rig.backend().stats().corrupt_pages == ++corrupt);
  }
  // Of another type: not there, dropped when it is read, overwritten when the page is put.
  REQUIRE(server.ask({"LPUSH", key_of(rig, 0), "x"}) == "1");
  CHECK(rig.exists(0, 1) == all(1, Status::not_found));
  CHECK(rig.get(0, 1) == all(1, Status::corrupt));
  CHECK(server.ask({"EXISTS", key_of(rig, 0)}) == "0");
  REQUIRE(server.ask({"LPUSH", key_of(rig, 0), "x"}) == "1");
  rig.fill(0);
  CHECK(rig.put(0, 1) == all(1, Status::ok));
  CHECK(server.ask({"GET", key_of(rig, 0)}) == good);
  // A value of a wrong length does not count as the page.
  REQUIRE(server.ask({"SET", key_of(rig, 0), good.substr(0, 1000)}) == "OK");
  CHECK(rig.exists(0, 1) == all(1, Status::not_found));
  CHECK(rig.put(0, 1) == all(1, Status::ok));
  CHECK(server.ask({"GET", key_of(rig, 0)}) == good);
  CHECK(rig.backend().health().usable);
  CHECK(rig.sink().breaches().empty());
}

TEST_CASE("redis: a cancelled or late batch ends what has not begun") {
  NEED_REDIS();
  const RedisServer server;
  BackendRig rig;
  rig.attach("redis",
             settings_for(server.tcp(), {{"connections", 1}, {"depth", 1}, {"response_timeout_ms", 60000}}));
  for (std::uint32_t n = 0; n < 4; ++n) rig.fill(n);
  REQUIRE(rig.put(0, 4) == all(4, Status::ok));

  server.signal(SIGSTOP);
  // One page of the first batch is on its way, everything else waits.
  const auto running = rig.submit(StorageOperation::get, 0, 4);
  const auto late = rig.submit(StorageOperation::get, 0, 4, monotonic_ns() + 50 * kMsNs);
  const auto expired = rig.submit(StorageOperation::exists, 0, 4, 1);
  CHECK(rig.sink().outcomes(expired) == all(4, Status::timed_out));
  CHECK(rig.sink().outcomes(late) == all(4, Status::timed_out));
  rig.backend().cancel(running);
  rig.backend().cancel(daemon::StorageBatchId{12345});
  CHECK_FALSE(
      rig.sink().outcomes(running, 200));  // its first page belongs to the backend until it is answered
  server.signal(SIGCONT);
  CHECK(rig.sink().outcomes(running) ==
        std::vector{Status::ok, Status::closed, Status::closed, Status::closed});
  CHECK(rig.get(0, 4) == all(4, Status::ok));
  CHECK(rig.sink().breaches().empty());
}

TEST_CASE("redis: detaching ends what waits with closed and waits for what runs") {
  NEED_REDIS();
  const RedisServer server;
  BackendRig rig;
  rig.attach("redis",
             settings_for(server.tcp(), {{"connections", 1}, {"depth", 1}, {"response_timeout_ms", 60000}}));
  rig.fill(0);
  rig.fill(1);
  REQUIRE(rig.put(0, 2) == all(2, Status::ok));
  server.signal(SIGSTOP);
  const auto batch = rig.submit(StorageOperation::get, 0, 2);
  CHECK_FALSE(rig.sink().outcomes(batch, 100));
  std::thread goes_on([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    server.signal(SIGCONT);
  });
  rig.detach();
  goes_on.join();
  CHECK(rig.sink().outcomes(batch, 0) == std::vector{Status::ok, Status::closed});
  CHECK(rig.sink().breaches().empty());
}

TEST_CASE(
    "redis: AUTH with user and password, from the settings or a file; a wrong one is said, never shown") {
  NEED_REDIS();
  const std::string secret = "correct horse battery staple";
  // The rights that docs/storage-redis.md names are enough.
  const RedisServer server({"--requirepass", secret, "--user", "cache", "on", ">" + secret + "2",
                            "~hicache:*", "+strlen", "+get", "+set", "+pexpire", "+del", "+scan", "+ping",
                            "+select", "+asking", "+cluster|slots"});
  const TempDir dir;
  write_text(dir.file("password"), secret + "2\n");
  const auto works = [&](const Json& more) {
    BackendRig rig;
    rig.attach("redis", settings_for(server.tcp(), more));
    rig.fill(0);
    const bool kept = rig.put(0, 1) == all(1, Status::ok) && rig.get(0, 1) == all(1, Status::ok);
    return kept && rig.backend().clear() && eventually([&] { return rig.put(0, 1) == all(1, Status::ok); }) &&
           rig.backend().health().text.find(";") == std::string::npos;
  };
  CHECK(works({{"password", secret}}));
  CHECK(works({{"user", "cache"}, {"password", secret + "2"}}));
  CHECK(works({{"user", "cache"}, {"password_file", dir.file("password")}}));

  BackendRig rig;
  rig.attach("redis", settings_for(server.tcp(), {{"password", "wrong secret"}}));
  CHECK(rig.get(0, 5) == all(5, Status::system_error));
  CHECK(eventually([&] { return rig.backend().health().text.find("WRONGPASS") != std::string::npos; }));
  CHECK_FALSE(rig.backend().health().usable);
  CHECK(rig.backend().health().text.find("secret") == std::string::npos);
  BackendRig none;
  none.attach("redis", settings_for(server.tcp()));
  CHECK(none.get(0, 5) == all(5, Status::system_error));
  CHECK(eventually([&] { return none.backend().health().text.find("NOAUTH") != std::string::npos; }));
}
