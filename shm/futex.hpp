// Futex on a word in shared memory. Never without a time-out.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <cerrno>
#include <climits>
#include <ctime>

#include <atomic>
#include <cstdint>

namespace hicache {

// Sleeps while *word == expected, at most timeout_ns. Returns 0 when woken, or EAGAIN, EINTR, ETIMEDOUT.
inline int futex_wait(const std::atomic<std::uint32_t>* word, std::uint32_t expected,
                      std::uint64_t timeout_ns) {
  timespec ts{static_cast<time_t>(timeout_ns / 1'000'000'000ull),
              static_cast<long>(timeout_ns % 1'000'000'000ull)};
  const long rc = ::syscall(SYS_futex, word, FUTEX_WAIT, expected, &ts, nullptr, 0);
  return rc == 0 ? 0 : errno;
}
inline void futex_wake_all(const std::atomic<std::uint32_t>* word) {
  ::syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}
inline void futex_wake_one(const std::atomic<std::uint32_t>* word) {
  ::syscall(SYS_futex, word, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

}  // namespace hicache
