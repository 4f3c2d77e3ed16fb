// How much memory may still be taken on this machine: never what the system needs, never more than a control
// group allows. One reservation for the node: the daemon asks before it makes its pool, and ranks own handles
// of that pool, not bytes.
//
// Thread safety: pure but for available_memory, which reads the system's files.
#pragma once

#include <cstdint>
#include <string>

#include "shm/status.hpp"

namespace hicache {

// What SGLang leaves to the rest of the machine.
constexpr std::uint64_t kHostMemoryReserve = 10ull << 30;

// Bytes that one of `ranks` ranks may take of `available`. 0 when the reserve is not there.
std::uint64_t host_memory_budget(std::uint64_t available, std::uint32_t ranks = 1,
                                 std::uint64_t reserve = kHostMemoryReserve);
// no_space with the figures when `requested` is more than the budget.
Outcome check_host_memory(std::uint64_t requested, std::uint64_t available, std::uint32_t ranks = 1,
                          std::uint64_t reserve = kHostMemoryReserve);

// Bytes that this process could still take: what the machine has available, or less where a control group of
// this process (version 1 or 2, any level) allows less. `root` is put before /proc and /sys, for tests.
Result<std::uint64_t> available_memory(const std::string& root = "");

}  // namespace hicache
