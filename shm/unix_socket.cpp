#include "shm/unix_socket.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>

#include "shm/clock.hpp"

namespace hicache {
namespace {

Error os_error(Status status, const std::string& what) {
  const int code = errno;
  return Error{status, what + ": " + std::strerror(code), code};
}

Result<sockaddr_un> address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path) {
    return Error{
        Status::invalid_argument,
        "socket path '" + path + "' must have 1 to " + std::to_string(sizeof address.sun_path - 1) + " bytes",
        0};
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

// Waits until `events` or a hang-up, at most until `deadline_ns`.
Outcome wait_for(int fd, short events, std::uint64_t deadline_ns) {
  for (;;) {
    const std::uint64_t now = monotonic_ns();
    const int left = now >= deadline_ns ? 0 : static_cast<int>((deadline_ns - now + 999'999) / 1'000'000);
    pollfd p{fd, events, 0};
    const int rc = ::poll(&p, 1, left);
    if (rc > 0) return success();
    if (rc == 0 && monotonic_ns() >= deadline_ns) return Error{Status::timed_out, "no answer in time", 0};
    if (rc < 0 && errno != EINTR) return os_error(Status::system_error, "poll");
  }
}

std::uint64_t deadline_in(int timeout_ms) {
  return monotonic_ns() + static_cast<std::uint64_t>(timeout_ms) * 1'000'000;
}

// Makes way for a new listener at `path`: removes the socket file of a dead one, and nothing else.
Outcome remove_stale_socket(const std::string& path, const sockaddr_un& address) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) return success();  // bind says what else is wrong with the path
  if (!S_ISSOCK(info.st_mode)) {
    return Error{Status::exists,
                 "cannot listen at " + path + ": expected a socket or nothing there, found another file",
                 EEXIST};
  }
  const UniqueFd probe(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!probe.valid()) return os_error(Status::system_error, "socket");
  const int rc = ::connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
  if (rc != 0 && errno == ENOENT) return success();
  if (rc != 0 && errno == ECONNREFUSED) {
    if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
      return os_error(Status::system_error, "cannot remove the old socket " + path);
    }
    return success();
  }
  return Error{
      Status::exists,
      "cannot listen at " + path + ": another process does already: stop it, or use another socket.path",
      EADDRINUSE};
}

bool peer_gone(int code) {
  return code == EPIPE || code == ECONNRESET || code == ENOTCONN;
}

}  // namespace

Result<UniqueFd> listen_unix(const std::string& path, bool world_connectable) {
  auto address = address_of(path);
  if (!address) return address.error();
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return os_error(Status::system_error, "socket");
  if (const Outcome free = remove_stale_socket(path, *address); !free) return free.error();
  // The name gets the mode of the socket. A mask would be the whole process's, whose other threads make
  // files.
  if (::fchmod(fd.get(), 0600) != 0) return os_error(Status::system_error, "fchmod of a socket");
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof(sockaddr_un)) != 0)
    return os_error(Status::system_error, "cannot listen at " + path);
  if (world_connectable && ::chmod(path.c_str(), 0666) != 0) {
    return os_error(Status::system_error, "chmod " + path);
  }
  if (::listen(fd.get(), 128) != 0) return os_error(Status::system_error, "listen at " + path);
  return fd;
}

Result<UniqueFd> connect_unix(const std::string& path) {
  auto address = address_of(path);
  if (!address) return address.error();
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return os_error(Status::system_error, "socket");
  // The accept queue of a stopped daemon can be full: never wait there without an end.
  timeval limit{5, 0};
  ::setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof(sockaddr_un)) != 0) {
    const bool absent = errno == ENOENT || errno == ECONNREFUSED;
    const bool late = errno == EAGAIN || errno == EINPROGRESS;
    return os_error(absent ? Status::daemon_absent
                    : late ? Status::timed_out
                           : Status::system_error,
                    "cannot reach a daemon at " + path);
  }
  return fd;
}

Result<PeerCredentials> peer_credentials(int fd) {
  ucred cred{};
  socklen_t size = sizeof cred;
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &size) != 0) {
    return os_error(Status::system_error, "SO_PEERCRED");
  }
  return PeerCredentials{static_cast<std::uint32_t>(cred.pid), cred.uid, cred.gid};
}

Outcome send_message(int fd, std::span<const std::uint8_t> bytes, std::span<const int> fds, int timeout_ms) {
  if (bytes.size() > kMaxMessageBytes || fds.size() > kMaxMessageFds) {
    return Error{Status::too_large,
                 "message of " + std::to_string(bytes.size()) + " bytes and " + std::to_string(fds.size()) +
                     " descriptors; at most " + std::to_string(kMaxMessageBytes) + " and " +
                     std::to_string(kMaxMessageFds),
                 0};
  }
  iovec iov{const_cast<std::uint8_t*>(bytes.data()), bytes.size()};
  msghdr header{};
  header.msg_iov = &iov;
  header.msg_iovlen = 1;
  alignas(cmsghdr) std::uint8_t control[CMSG_SPACE(sizeof(int) * kMaxMessageFds)] = {};
  if (!fds.empty()) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(sizeof(int) * fds.size());
    cmsghdr* c = CMSG_FIRSTHDR(&header);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
    std::memcpy(CMSG_DATA(c), fds.data(), sizeof(int) * fds.size());
  }
  const std::uint64_t deadline = deadline_in(timeout_ms);
  for (;;) {
    if (::sendmsg(fd, &header, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return success();
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (auto waited = wait_for(fd, POLLOUT, deadline); !waited) return waited.error();
    } else if (errno != EINTR) {
      return os_error(peer_gone(errno) ? Status::daemon_lost : Status::system_error, "send");
    }
  }
}

Result<Message> receive_message(int fd, int timeout_ms) {
  Message message;
  message.bytes.resize(kMaxMessageBytes);
  const std::uint64_t deadline = deadline_in(timeout_ms);
  for (;;) {
    iovec iov{message.bytes.data(), message.bytes.size()};
    alignas(cmsghdr) std::uint8_t control[CMSG_SPACE(sizeof(int) * kMaxMessageFds)];
    msghdr header{};
    header.msg_iov = &iov;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    const ssize_t n = ::recvmsg(fd, &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        if (auto waited = wait_for(fd, POLLIN, deadline); !waited) return waited.error();
        continue;
      }
      return os_error(peer_gone(errno) ? Status::daemon_lost : Status::system_error, "receive");
    }
    for (cmsghdr* c = CMSG_FIRSTHDR(&header); c != nullptr; c = CMSG_NXTHDR(&header, c)) {
      if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
      const std::size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (std::size_t i = 0; i < count; ++i) {
        int received = -1;
        std::memcpy(&received, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
        message.fds.emplace_back(received);
      }
    }
    if (n == 0) return Error{Status::daemon_lost, "the peer closed the connection", 0};
    if ((header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
      return Error{Status::too_large, "message larger than " + std::to_string(kMaxMessageBytes) + " bytes",
                   0};
    }
    message.bytes.resize(static_cast<std::size_t>(n));
    return message;
  }
}

}  // namespace hicache
