// One connection at the daemon's socket. Belongs to the session thread alone.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "daemon/coordinator/requests.hpp"
#include "daemon/kernel/kernel_link.hpp"
#include "daemon/sessions/peer_watch.hpp"
#include "shm/fd.hpp"
#include "shm/messages.hpp"
#include "shm/unix_socket.hpp"

namespace hicache::daemon {

enum class ConnectionState {
  greeting,   // has not said Hello
  refusing,   // gets `refusal` in answer to its first message, so that it can read why
  attaching,  // the coordinator decides
  attached,   // a rank or scheduler
  tool,       // control commands only
};

struct Connection {
  std::uint64_t id = 0;
  UniqueFd socket;
  UniqueFd pidfd;  // invalid where the kernel does not show the process
  PeerCredentials peer;
  std::uint64_t start_ticks = 0;
  ConnectionState state = ConnectionState::greeting;
  std::uint64_t deadline_ns = 0;  // closed when it passes; 0 = none
  bool busy = false;              // a request of it is not answered yet: further ones are a breach
  std::optional<Reply> refusal;

  // From Hello on, for ranks and schedulers.
  std::uint32_t protocol = 0;
  std::uint64_t wanted_features = 0;
  Role role = Role::rank;
  std::uint32_t tp_rank = 0;
  bool read_only = false;  // by socket.read_only_uids, when it attached
  ChannelGeometry geometry;
  std::shared_ptr<Mapping> channel;
  UniqueFd channel_fd;  // until Welcome has been sent
  std::shared_ptr<UniqueFd> kick;
  std::shared_ptr<KernelLink> kernel;  // io_backend kernel, and allowed; else null
  // From the coordinator's answer on.
  AttachAnswer client;
  bool buffers_sent = false;
  std::unique_ptr<PeerWatch> tripwire;
};

}  // namespace hicache::daemon
