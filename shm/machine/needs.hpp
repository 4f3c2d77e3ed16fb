// What a daemon with a given configuration needs from the machine it starts on. The daemon makes it from its
// configuration; tools get it as text from `hicached --print-needs`, so that they judge by the daemon's own
// figures and need none of its code.
#pragma once

#include <cstdint>
#include <string>

#include "shm/status.hpp"

namespace hicache::machine {

enum class HugePageNeed : std::uint8_t { none, preferred, required };
enum class GpuNeed : std::uint8_t { none, on_demand, at_start };
enum class IoUringNeed : std::uint8_t { none, preferred, required };

// Sizes in bytes.
struct Needs {
  std::string name;                  // of the daemon, and so of its shared memory objects
  std::string socket_path;           // where it would listen
  bool own_directory = false;        // the socket's directory is made by the daemon when it is missing
  std::uint64_t pool_bytes = 0;      // whole segments
  std::uint64_t control_bytes = 0;   // of the control region
  std::uint64_t memory_reserve = 0;  // of the memory, left for everybody else
  std::uint32_t clients = 0;         // limits.clients
  HugePageNeed huge_pages = HugePageNeed::none;
  GpuNeed gpus = GpuNeed::none;
  IoUringNeed io_uring = IoUringNeed::none;

  // What the start reserves in /dev/shm.
  [[nodiscard]] std::uint64_t reserved_bytes() const { return pool_bytes + control_bytes; }
};

// One "key value" line for each field.
std::string needs_to_text(const Needs& needs);
// The reverse. invalid_argument naming the line or the key unless every field is there once and nothing else.
Result<Needs> parse_needs(const std::string& text);

}  // namespace hicache::machine
