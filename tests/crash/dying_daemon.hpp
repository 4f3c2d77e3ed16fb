// A daemon that kills itself at a named point (shm/crash_points.hpp), and what it is asked meanwhile.
#pragma once

#include <csignal>
#include <stdexcept>
#include <string>
#include <vector>

#include "shm/crash_points.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/processes.hpp"

namespace hicache::test {

struct CrashPoint {
  std::string name;
  const char* where;
};
#define HICACHE_X(name, where) {#name, where},
inline std::vector<CrashPoint> daemon_crash_points() {
  return {HICACHE_DAEMON_CRASH_POINTS(HICACHE_X)};
}
inline std::vector<CrashPoint> storage_crash_points() {
  return {HICACHE_STORAGE_CRASH_POINTS(HICACHE_X)};
}
inline std::vector<CrashPoint> redis_crash_points() {
  return {HICACHE_REDIS_CRASH_POINTS(HICACHE_X)};
}
inline std::vector<CrashPoint> kernel_daemon_crash_points() {
  return {HICACHE_KERNEL_DAEMON_CRASH_POINTS(HICACHE_X)};
}
inline std::vector<CrashPoint> client_crash_points() {
  return {HICACHE_CLIENT_CRASH_POINTS(HICACHE_X)};
}
inline std::vector<CrashPoint> kernel_client_crash_points() {
  return {HICACHE_KERNEL_CLIENT_CRASH_POINTS(HICACHE_X)};
}
#undef HICACHE_X
#define HICACHE_X(name, where) +1
static_assert(0 HICACHE_DAEMON_CRASH_POINTS(HICACHE_X) >= 40);
#undef HICACHE_X

// Starts hicached-crashing in the place of `daemon`, which does not run, and lets `exercise` make it do all
// that it does, until it dies at the point: an exercise ends early when it does. Fails when the point was not
// reached.
template <class Exercise>
void die_at(const CrashPoint& point, const TestDaemon& daemon, const Exercise& exercise) {
  Child dying = Child::spawn({program("hicached-crashing"), "--config", daemon.config_path(), "--foreground"},
                             {"HICACHE_CRASH_AT=" + point.name});
  if (dying.read_line()) {
    try {
      exercise(daemon.socket_path());
    } catch (const std::runtime_error&) {
      // An attach that the daemon did not live to answer.
    }
  }
  dying.kill(SIGTERM);  // a point that was not reached must not stop the others
  const auto end = dying.wait();
  REQUIRE(end.has_value());
  CHECK(end->signal == SIGKILL);
}

}  // namespace hicache::test
