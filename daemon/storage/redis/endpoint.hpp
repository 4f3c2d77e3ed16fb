// Where a server listens.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "shm/fd.hpp"
#include "shm/status.hpp"

namespace hicache::daemon::redis {

struct Endpoint {
  std::string text;  // "unix:/path", "10.0.0.1:6379" or "[::1]:6379": the same place has the same text
  sockaddr_storage address{};
  socklen_t address_bytes = 0;
};

// Whether names may be looked up, which can take seconds, or only numbers are taken.
enum class Names : std::uint8_t { look_up, refuse };

// From "unix:/path", "host:port" or "[v6]:port". invalid_argument with what is wrong about it.
Result<Endpoint> make_endpoint(const std::string& text, Names names);
// From an address that a server named. `host` empty or "?": the same host as `asked`.
Result<Endpoint> make_endpoint(const std::string& host, std::uint16_t port, const Endpoint& asked);

// Begins to connect, without waiting: the socket becomes writable when it is connected or has failed.
Result<UniqueFd> begin_connect(const Endpoint& endpoint);

}  // namespace hicache::daemon::redis
