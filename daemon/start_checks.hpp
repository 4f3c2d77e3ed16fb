// Limits that would end the daemon later, looked at before it starts: `hicache-ctl doctor` shows them all,
// here are those that must stop a start.
#pragma once

#include <string>

#include "daemon/config.hpp"
#include "shm/status.hpp"

namespace hicache::daemon {

// no_space with cause and remedy when a cgroup would kill the daemon for the memory that it reserves, or when
// its clients' descriptors would not fit the limit of open files (after raise_descriptor_limit). What is only
// likely to fail later is logged. `root` stands before /proc and /sys, for tests.
Outcome check_start_limits(const Config& config, const std::string& root = "");

}  // namespace hicache::daemon
