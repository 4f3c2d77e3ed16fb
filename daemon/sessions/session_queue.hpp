// What other threads tell the session thread: a queue with an eventfd that its epoll watches.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>
#include <mutex>
#include <utility>
#include <variant>
#include <vector>

#include "daemon/config.hpp"
#include "daemon/coordinator/requests.hpp"
#include "shm/fd.hpp"
#include "shm/messages.hpp"

namespace hicache::daemon {

// The coordinator decided about a Hello.
struct AttachAnswered {
  std::uint64_t connection = 0;
  AttachAnswer answer;
};
// A RegisterBuffers or Control of the connection was answered.
struct RequestAnswered {
  std::uint64_t connection = 0;
  Reply reply;
};
// The tripwire of the connection's client fired: its process is dying.
struct PeerDied {
  std::uint64_t connection = 0;
};
struct Reconfigured {
  Config config;
};
// From now on every Hello is refused with shutting_down.
struct Draining {};
struct Stopped {};

using SessionEvent = std::variant<AttachAnswered, RequestAnswered, PeerDied, Reconfigured, Draining, Stopped>;

// Shared by the session thread and by every callback that answers to it, so that a late answer finds it
// alive.
class SessionQueue {
 public:
  SessionQueue() : wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

  [[nodiscard]] int fd() const { return wake_.get(); }

  // Never blocks on the session thread. From any thread.
  void push(SessionEvent event) {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
    // A full counter means that a wake-up is pending already.
    const std::uint64_t one = 1;
    static_cast<void>(!::write(wake_.get(), &one, sizeof one));
  }
  std::vector<SessionEvent> take() {
    std::uint64_t count = 0;
    static_cast<void>(!::read(wake_.get(), &count, sizeof count));
    const std::lock_guard lock(mutex_);
    return std::exchange(events_, {});
  }

 private:
  UniqueFd wake_;
  std::mutex mutex_;
  std::vector<SessionEvent> events_;
};

}  // namespace hicache::daemon
