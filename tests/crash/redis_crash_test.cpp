// A daemon dies at each named point of its talk with a Redis server (shm/crash_points.hpp). The server lives
// on and has whole pages or none; the next daemon finds them.
#include <string>

#include "tests/crash/storage_death.hpp"
#include "tests/support/redis_server.hpp"

namespace hicache::test {
namespace {

std::string key_of(const PrefixHash& hash) {
  return "hicache:" + to_hex(stored_spec().digest()) + ":" + to_hex(hash);
}

// Asks the server to forget, after something is there to be forgotten.
void exercise_clear(const std::string& socket) {
  TestRank rank(socket, "engine", 0, stored_spec());
  static_cast<void>(control(socket, {"storage", "clear"}, kPatienceMs));
  // It goes on behind the answer.
  static_cast<void>(eventually([&] { return rank.session().state() != Status::ok; }));
}

}  // namespace

TEST_CASE("the daemon may die at every named point of its talk with a Redis server") {
  if (!RedisServer::available()) {
    WARN("SKIPPED: redis-server is not installed");
    return;
  }
  for (const CrashPoint& point : redis_crash_points()) {
    const RedisServer server;
    StorageDeath death;
    death.point = point;
    death.storage = nlohmann::json{{"backend", "redis"}, {"redis", {{"endpoints", {server.tcp()}}}}}.dump();
    if (point.name.starts_with("redis_corrupt_")) {
      // The last page of a prompt is another record than its key says.
      const std::string spoilt = key_of(prompt(0, kPages).back());
      death.prepare = [&server, spoilt] { REQUIRE(server.ask({"SETRANGE", spoilt, "200", "!"}) != "0"); };
      death.may_lose = 1;
    }
    if (point.name.starts_with("redis_clear_")) {
      death.exercise = exercise_clear;
      death.may_lose = kStoredPages;
    }
    die_and_come_back(death);
  }
}

}  // namespace hicache::test
