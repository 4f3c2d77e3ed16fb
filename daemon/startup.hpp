// What a Unix daemon does around its work: logging, detaching from the terminal, limits, signals, telling
// systemd.
#pragma once

#include <string>

#include "daemon/config.hpp"
#include "shm/fd.hpp"
#include "shm/status.hpp"

namespace hicache::daemon {

// Makes spdlog's default logger write to the configured place.
Outcome configure_logging(const Config::Log& log);

// Raises the limits of open descriptors and of locked memory as far as this user may: every client needs
// several of the former, and a pool that is pinned for GPUs counts as the latter.
void raise_limits();
// Freed memory stays with the process, up to 64 MiB: lists of large requests come and go, and the page faults
// of fresh memory cost more than filling it. For the call before any thread exists.
void keep_freed_memory();

// Ignores SIGPIPE and blocks SIGTERM, SIGINT and SIGHUP in this thread and all it starts; they arrive at the
// returned signalfd instead.
Result<UniqueFd> capture_signals();

// Continues in a child without a terminal. The calling process stays until the child is ready or has ended,
// and exits with 0 or the child's exit code. Must run before any thread starts.
class Detachment {
 public:
  static Result<Detachment> detach();
  // Lets the waiting process exit with 0 and gives standard input and output back.
  void ready();

 private:
  explicit Detachment(UniqueFd pipe) : pipe_(std::move(pipe)) {}
  UniqueFd pipe_;
};

// Sends a state such as "READY=1" to $NOTIFY_SOCKET, if a service manager set it.
void notify_service_manager(const std::string& state);

}  // namespace hicache::daemon
