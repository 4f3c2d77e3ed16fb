#include "daemon/storage/redis/endpoint.hpp"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/un.h>

#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <string_view>

namespace hicache::daemon::redis {
namespace {

Error refused(const std::string& why) {
  return {Status::invalid_argument, why, 0};
}

Result<Endpoint> unix_endpoint(const std::string& path) {
  Endpoint endpoint;
  auto& address = reinterpret_cast<sockaddr_un&>(endpoint.address);
  if (path.empty() || path[0] != '/') return refused("expected an absolute path behind unix:");
  if (path.size() >= sizeof address.sun_path) {
    return refused("the path of a Unix socket has at most " + std::to_string(sizeof address.sun_path - 1) +
                   " bytes");
  }
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  endpoint.address_bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size() + 1);
  endpoint.text = "unix:" + path;
  return endpoint;
}

Result<Endpoint> tcp_endpoint(const std::string& host, const std::string& port, Names names) {
  std::uint16_t number = 0;
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), number);
  if (error != std::errc{} || end != port.data() + port.size() || number == 0) {
    return refused("expected a port from 1 to 65535 behind the host");
  }
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (names == Names::refuse ? AI_NUMERICHOST : 0);
  addrinfo* found = nullptr;
  if (const int code = ::getaddrinfo(host.c_str(), port.c_str(), &hints, &found); code != 0) {
    return refused(std::string("the host can't be resolved: ") + ::gai_strerror(code));
  }
  Endpoint endpoint;
  std::memcpy(&endpoint.address, found->ai_addr, found->ai_addrlen);
  endpoint.address_bytes = found->ai_addrlen;
  ::freeaddrinfo(found);
  char numeric[NI_MAXHOST] = "";
  if (::getnameinfo(reinterpret_cast<const sockaddr*>(&endpoint.address), endpoint.address_bytes, numeric,
                    sizeof numeric, nullptr, 0, NI_NUMERICHOST) != 0) {
    return refused("the host has no numeric address");
  }
  const bool v6 = endpoint.address.ss_family == AF_INET6;
  endpoint.text = (v6 ? "[" + std::string(numeric) + "]" : numeric) + ":" + std::to_string(number);
  return endpoint;
}

}  // namespace

Result<Endpoint> make_endpoint(const std::string& text, Names names) {
  if (text.starts_with("unix:")) return unix_endpoint(text.substr(5));
  const std::size_t colon = text.rfind(':');
  if (colon == std::string::npos || colon == 0) return refused("expected \"host:port\" or \"unix:/path\"");
  std::string host = text.substr(0, colon);
  if (host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string::npos) {
    return refused("expected an IPv6 address in brackets, such as \"[::1]:6379\"");
  }
  return tcp_endpoint(host, text.substr(colon + 1), names);
}

Result<Endpoint> make_endpoint(const std::string& host, std::uint16_t port, const Endpoint& asked) {
  if (!host.empty() && host != "?") return tcp_endpoint(host, std::to_string(port), Names::refuse);
  if (port == 0 || asked.address.ss_family == AF_UNIX) return refused("a node without an address");
  const std::string_view same = std::string_view(asked.text).substr(0, asked.text.rfind(':') + 1);
  return make_endpoint(std::string(same) + std::to_string(port), Names::refuse);
}

Result<UniqueFd> begin_connect(const Endpoint& endpoint) {
  UniqueFd fd(::socket(endpoint.address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return Error{Status::system_error, std::strerror(errno), errno};
  if (endpoint.address.ss_family != AF_UNIX) {
    const int on = 1;
    ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    ::setsockopt(fd.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  }
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&endpoint.address), endpoint.address_bytes) !=
          0 &&
      errno != EINPROGRESS) {
    return Error{Status::system_error, std::strerror(errno), errno};
  }
  return fd;
}

}  // namespace hicache::daemon::redis
