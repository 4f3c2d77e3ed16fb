// Who a process is: a pid alone means nothing once it was reused, so pid and start time go together.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "shm/fd.hpp"

namespace hicache {

// Start time of a process in clock ticks since boot, from /proc; nothing when the process is gone or a
// zombie.
std::optional<std::uint64_t> process_start_ticks(std::uint32_t pid);

struct ProcessIdentity {
  std::uint32_t pid = 0;
  std::uint64_t start_ticks = 0;
  static ProcessIdentity self();
  // True while that very process runs (a zombie does not).
  [[nodiscard]] bool alive() const;
};

// Waits until that very process has ended with all its threads, memory and open files, at most timeout_ms.
// True when it has. A pid that was reused by another process counts as ended. (A process whose main thread is
// a zombie may have other threads that still run: asking for its state is not enough.)
bool await_process_end(const ProcessIdentity& process, int timeout_ms);

// Text that changes with every boot of the kernel, empty where /proc does not show it.
std::string boot_id();

// A descriptor that becomes readable when the process has ended; invalid where the kernel refuses.
UniqueFd open_pidfd(std::uint32_t pid);

}  // namespace hicache
