#include "fork_guard.hpp"

#include <pthread.h>

#include <atomic>

namespace hicache {
namespace {

// Forks between this process and the first one that loaded the library. Relaxed: the only writer is the
// child's only thread, before fork() returns there.
std::atomic<std::uint64_t> fork_generation{0};

void count_fork() {
  fork_generation.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

ForkGuard::ForkGuard() {
  static const int registered = ::pthread_atfork(nullptr, nullptr, count_fork);
  static_cast<void>(registered);
  generation_ = fork_generation.load(std::memory_order_relaxed);
}

bool ForkGuard::forked() const {
  return fork_generation.load(std::memory_order_relaxed) != generation_;
}

}  // namespace hicache
