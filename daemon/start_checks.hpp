// The start checks (shm/machine/checks.hpp), as the daemon runs them: what must stop a start does, and what
// is only worse than it could be is logged.
#pragma once

#include <thread>

#include "shm/machine/machine.hpp"
#include "shm/machine/needs.hpp"
#include "shm/status.hpp"

namespace hicache::daemon {

// Runs every check but that of the GPUs, after raise_limits(). Each degraded one is a warning in the log; an
// error with cause and remedy of each refused one, a line each.
Outcome check_start(const machine::Needs& needs, const machine::Probes& probes = machine::Probes::real());

// Looks at the GPUs and logs what is wrong with them, in a thread of its own, because nvidia-smi takes up to
// seconds and a start must not. Without a driver or with cuda.mode off there is no thread.
class GpuCheck {
 public:
  explicit GpuCheck(const machine::Needs& needs);
  // Waits for the thread: 10 s at most.
  ~GpuCheck();
  GpuCheck(const GpuCheck&) = delete;
  GpuCheck& operator=(const GpuCheck&) = delete;

 private:
  std::thread thread_;
};

}  // namespace hicache::daemon
