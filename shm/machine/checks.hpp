// The start checks: limits and settings of a machine that a daemon can't live with, or only worse. The daemon
// runs them when it starts, `hicache-ctl doctor` on request. Pure functions of needs and machine.
#pragma once

#include <string>
#include <vector>

#include "shm/machine/machine.hpp"
#include "shm/machine/needs.hpp"

namespace hicache::machine {

// degraded: the daemon starts, and says what is slower, missing or at risk. refused: it does not start.
enum class Level { ok, degraded, refused };
const char* to_text(Level level);

struct Check {
  std::string name;
  Level level = Level::ok;
  std::string found;   // what is there, with the value
  std::string remedy;  // what to do; empty when ok
};

// All but the GPUs, always every check, in the order of a report.
std::vector<Check> examine(const Needs& needs, const Machine& machine);
// After measure_gpus(). Never refused: ranks without GPU memory can be served in any case.
Check check_gpus(const Needs& needs, const Machine& machine);

// Parts of examine().
Check check_shm(const Needs& needs, const Machine& machine);
Check check_memory(const Needs& needs, const Machine& machine);
Check check_socket(const Needs& needs, const SocketDirectory& directory, std::uint32_t uid);

// A check as one line of a log: what, found, and the remedy.
std::string sentence(const Check& check);

}  // namespace hicache::machine
