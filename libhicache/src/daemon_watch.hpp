// Tells whether the daemon behind a session still lives, from its socket and its process.
#pragma once

#include <cstdint>
#include <optional>

#include "shm/fd.hpp"
#include "shm/process.hpp"

namespace hicache {

// Thread safety: `hung_up` and `process_gone` may be called from any thread; the rest belongs to attach.
class DaemonWatch {
 public:
  DaemonWatch() = default;
  // `socket_fd` stays the caller's. `start_ticks` is what the daemon said of itself: the process behind the
  // socket is only watched when it agrees (it does not where the daemon lives in another pid namespace).
  DaemonWatch(int socket_fd, std::uint64_t start_ticks);

  // True once the connection or the process has ended. One system call.
  [[nodiscard]] bool hung_up() const;
  // True once the daemon's process is known to have ended: no copy of it can land any more. False where it
  // can't be watched.
  [[nodiscard]] bool process_gone() const;

 private:
  int socket_fd_ = -1;
  UniqueFd pidfd_;
  std::optional<ProcessIdentity> process_;
};

}  // namespace hicache
