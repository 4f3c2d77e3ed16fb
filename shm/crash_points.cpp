// Part of test builds only: see tests/crash/CMakeLists.txt.
#include "shm/crash_points.hpp"

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <string>

namespace hicache {
namespace {

struct Fate {
  std::string name;
  int times = 1;
};

Fate read_fate() {
  Fate fate;
  const char* text = std::getenv("HICACHE_CRASH_AT");
  if (text == nullptr) return fate;
  fate.name = text;
  if (const auto colon = fate.name.find(':'); colon != std::string::npos) {
    fate.times = static_cast<int>(std::strtol(fate.name.c_str() + colon + 1, nullptr, 10));
    fate.name.resize(colon);
  }
  return fate;
}

}  // namespace

void crash_point(const char* name) {
  static const Fate fate = read_fate();
  static std::atomic<int> passed{0};
  if (fate.name != name || passed.fetch_add(1) + 1 < fate.times) return;
  ::kill(::getpid(), SIGKILL);
  for (;;) ::pause();
}

}  // namespace hicache
