// Who a process is: a pid alone means nothing once it was reused, so pid and start time go together.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "shm/fd.hpp"

namespace hicache {

// Start time of a process in clock ticks since boot, from /proc; nothing when the process is gone or a zombie.
std::optional<std::uint64_t> process_start_ticks(std::uint32_t pid);

struct ProcessIdentity {
  std::uint32_t pid = 0;
  std::uint64_t start_ticks = 0;
  static ProcessIdentity self();
  // True while that very process runs (a zombie does not).
  [[nodiscard]] bool alive() const;
};

// Text that changes with every boot of the kernel, empty where /proc does not show it.
std::string boot_id();

// A descriptor that becomes readable when the process has ended; invalid where the kernel refuses.
UniqueFd open_pidfd(std::uint32_t pid);

}  // namespace hicache
