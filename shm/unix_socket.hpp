// Unix SEQPACKET sockets: whole messages, descriptors beside them, and the peer's credentials.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "shm/fd.hpp"
#include "shm/status.hpp"

namespace hicache {

constexpr std::size_t kMaxMessageBytes = 160 * 1024;  // fits the default socket buffer
constexpr std::size_t kMaxMessageFds = 64;

struct PeerCredentials {
  std::uint32_t pid = 0;
  std::uint32_t uid = 0;
  std::uint32_t gid = 0;
};

struct Message {
  std::vector<std::uint8_t> bytes;
  std::vector<UniqueFd> fds;
};

// Listens at `path` (mode 0600, or 0666 when other users may attach). The socket file of a dead listener is
// replaced; where another one lives, or something that is no socket, exists.
Result<UniqueFd> listen_unix(const std::string& path, bool world_connectable);
// Connects, or daemon_absent.
Result<UniqueFd> connect_unix(const std::string& path);
Result<PeerCredentials> peer_credentials(int fd);

// Sends one message with its descriptors. `timeout_ms` bounds the wait for room. daemon_lost when the peer is
// gone.
Outcome send_message(int fd, std::span<const std::uint8_t> bytes, std::span<const int> fds, int timeout_ms);
// Receives one message. timed_out, or daemon_lost when the peer is gone. With timeout_ms 0 it does not wait.
Result<Message> receive_message(int fd, int timeout_ms);

}  // namespace hicache
