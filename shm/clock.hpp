// The two clocks of the project: monotonic for durations and deadlines, wall time for people.
#pragma once

#include <ctime>

#include <cstdint>

namespace hicache {

inline std::uint64_t clock_ns(clockid_t id) {
  timespec ts{};
  ::clock_gettime(id, &ts);
  return static_cast<std::uint64_t>(ts.tv_sec) * 1'000'000'000ull + static_cast<std::uint64_t>(ts.tv_nsec);
}
inline std::uint64_t monotonic_ns() {
  return clock_ns(CLOCK_MONOTONIC);
}
inline std::uint64_t unix_ns() {
  return clock_ns(CLOCK_REALTIME);
}

}  // namespace hicache
