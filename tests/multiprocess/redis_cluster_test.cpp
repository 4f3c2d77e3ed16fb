// The redis backend on a cluster of three real nodes: slots, MOVED, ASK, a node that dies.
#include "daemon/storage/redis/cluster.hpp"
#include "daemon/storage/redis/page_operation.hpp"
#include "tests/support/backend_rig.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/redis_server.hpp"

using namespace hicache;
using namespace hicache::test;
using Json = nlohmann::ordered_json;

namespace {

constexpr std::uint32_t kPages = 100;

std::vector<Status> all(std::size_t count, Status status) {
  return std::vector<Status>(count, status);
}

std::string key_of(const BackendRig& rig, std::uint32_t page) {
  return daemon::redis::page_key("hicache", rig.ns(), BackendRig::hash(page));
}
std::uint16_t slot_of(const BackendRig& rig, std::uint32_t page) {
  return daemon::redis::cluster_slot(key_of(rig, page));
}
std::size_t home_of(std::uint16_t slot) {
  return slot <= 5460 ? 0 : slot <= 10922 ? 1 : 2;
}

Json settings_for(RedisCluster& cluster, std::size_t seed) {
  return {{"endpoints", {cluster.node(seed).tcp()}},
          {"cluster", true},
          {"connections", 2},
          {"connect_timeout_ms", 500},
          {"response_timeout_ms", 500},
          {"reconnect_max_ms", 200}};
}

}  // namespace

TEST_CASE("redis cluster: pages spread over the nodes, and a slot that moves is followed") {
  if (!RedisServer::available()) {
    WARN("SKIPPED: redis-server is not installed");
    return;
  }
  RedisCluster cluster;
  BackendRig rig;
  rig.attach("redis", settings_for(cluster, 0));
  for (std::uint32_t n = 0; n < kPages; ++n) rig.fill(n);
  CHECK(rig.put(0, kPages) == all(kPages, Status::ok));
  std::size_t kept = 0;
  for (std::size_t i = 0; i < cluster.size(); ++i) {
    const auto keys = static_cast<std::size_t>(std::stoul(cluster.node(i).ask({"DBSIZE"})));
    CHECK(keys > kPages / 10);
    kept += keys;
  }
  CHECK(kept == kPages);
  rig.wipe();
  CHECK(rig.get(0, kPages) == all(kPages, Status::ok));
  for (std::uint32_t n = 0; n < kPages; ++n) CHECK(rig.holds(n, n));
  CHECK(eventually([&] { return rig.backend().health().text.find("3 of 3 nodes") != std::string::npos; }));

  SECTION("another backend that knows another node finds them") {
    BackendRig other;
    auto settings = settings_for(cluster, 2);
    settings["threads"] = 2;
    other.attach("redis", settings);
    CHECK(other.get(0, kPages) == all(kPages, Status::ok));
    for (std::uint32_t n = 0; n < kPages; ++n) CHECK(other.holds(n, n));
  }

  SECTION("a slot moves while its pages are asked for: ASK, then MOVED") {
    const std::uint16_t slot = slot_of(rig, 7);
    const std::size_t from = home_of(slot);
    const std::size_t to = (from + 1) % cluster.size();
    cluster.node(to).ask({"CONFIG", "RESETSTAT"});
    cluster.migrate(slot, from, to, [&] {
      rig.wipe();
      CHECK(rig.exists(7, 1) == all(1, Status::ok));
      CHECK(rig.get(7, 1) == all(1, Status::ok));
      CHECK(rig.holds(7, 7));
      const std::string calls = cluster.node(to).ask({"INFO", "commandstats"});
      CHECK(calls.find("cmdstat_asking:calls=2") != std::string::npos);
    });
    rig.wipe();
    CHECK(rig.get(0, kPages) == all(kPages, Status::ok));
    for (std::uint32_t n = 0; n < kPages; ++n) CHECK(rig.holds(n, n));
    const std::string errors = cluster.node(from).ask({"INFO", "errorstats"});
    CHECK(errors.find("errorstat_MOVED") != std::string::npos);
    // The way is known now: nothing is sent to the old node any more.
    cluster.node(from).ask({"CONFIG", "RESETSTAT"});
    CHECK(rig.get(7, 1) == all(1, Status::ok));
    CHECK(cluster.node(from).ask({"INFO", "errorstats"}).find("MOVED") == std::string::npos);
    // A put follows too, with its payload.
    cluster.node(to).ask({"DEL", key_of(rig, 7)});
    cluster.migrate(slot, to, from);
    CHECK(rig.put(7, 1) == all(1, Status::ok));
    rig.wipe();
    CHECK(rig.get(7, 1) == all(1, Status::ok));
    CHECK(rig.holds(7, 7));
  }

  SECTION("a node dies and comes back") {
    cluster.node(1).kill9();
    const auto check_without = [&] {
      const auto outcomes = rig.get(0, kPages);
      REQUIRE(outcomes.size() == kPages);
      for (std::uint32_t n = 0; n < kPages; ++n) {
        const bool lost = home_of(slot_of(rig, n)) == 1;
        CHECK((lost ? outcomes[n] == Status::system_error || outcomes[n] == Status::timed_out
                    : outcomes[n] == Status::ok));
      }
    };
    check_without();
    CHECK(eventually([&] { return rig.backend().health().text.find("2 of 3 nodes") != std::string::npos; }));
    CHECK(rig.backend().health().usable);
    check_without();
    cluster.node(1).start();
    CHECK(eventually([&] {
      return rig.exists(0, kPages) != all(0, Status::ok) && rig.put(0, kPages) == all(kPages, Status::ok);
    }));
    rig.wipe();
    CHECK(rig.get(0, kPages) == all(kPages, Status::ok));
    CHECK(eventually([&] { return rig.backend().health().text.find("3 of 3 nodes") != std::string::npos; }));
  }

  SECTION("clear reaches every node") {
    cluster.node(0).ask({"SET", "{somebody's}1", "x"});
    REQUIRE(rig.backend().clear());
    CHECK(rig.exists(0, kPages) == all(kPages, Status::not_found));
    CHECK(eventually([&] {
      std::size_t left = 0;
      for (std::size_t i = 0; i < cluster.size(); ++i) {
        for (std::uint32_t n = 0; n < kPages; ++n)
          left += cluster.node(i).ask({"EXISTS", key_of(rig, n)}) == "1" ? 1u : 0u;
      }
      return left == 0;
    }));
  }
  CHECK(rig.sink().breaches().empty());
}

TEST_CASE("redis cluster: one node given as a single server says what is missing, and the reverse") {
  if (!RedisServer::available()) {
    WARN("SKIPPED: redis-server is not installed");
    return;
  }
  RedisCluster cluster;
  BackendRig single;
  auto settings = settings_for(cluster, 0);
  settings["cluster"] = false;
  single.attach("redis", settings);
  CHECK(single.exists(0, 20) != all(20, Status::ok));
  CHECK(eventually([&] {
    return single.backend().health().text.find("storage.redis.cluster true") != std::string::npos;
  }));

  const RedisServer server;
  BackendRig reverse;
  reverse.attach("redis", {{"endpoints", {server.tcp()}}, {"cluster", true}});
  CHECK(reverse.get(0, 5) == all(5, Status::system_error));
  CHECK(eventually(
      [&] { return reverse.backend().health().text.find("cluster support disabled") != std::string::npos; }));
}
