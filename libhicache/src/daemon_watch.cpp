#include "daemon_watch.hpp"

#include <poll.h>

#include "shm/unix_socket.hpp"

namespace hicache {

DaemonWatch::DaemonWatch(int socket_fd, std::uint64_t start_ticks) : socket_fd_(socket_fd) {
  const auto peer = peer_credentials(socket_fd);
  if (!peer || peer->pid == 0) return;
  UniqueFd pidfd = open_pidfd(peer->pid);
  // Looked at after the pidfd was opened: equal start times prove that the pidfd means this very process.
  if (process_start_ticks(peer->pid) != start_ticks) return;
  process_ = ProcessIdentity{peer->pid, start_ticks};
  pidfd_ = std::move(pidfd);
}

bool DaemonWatch::hung_up() const {
  pollfd looks[2] = {{socket_fd_, POLLRDHUP, 0}, {pidfd_.get(), POLLIN, 0}};
  if (::poll(looks, pidfd_.valid() ? 2 : 1, 0) <= 0) return false;
  return (looks[0].revents & (POLLHUP | POLLRDHUP | POLLERR)) != 0 || (looks[1].revents & POLLIN) != 0;
}

bool DaemonWatch::process_gone() const {
  if (!process_) return false;
  if (!pidfd_.valid()) return !process_->alive();
  pollfd look{pidfd_.get(), POLLIN, 0};
  return ::poll(&look, 1, 0) > 0 && (look.revents & POLLIN) != 0;
}

}  // namespace hicache
