// The pure parts of a session's start: whether a Hello is acceptable, and what Welcome says.
#pragma once

#include <cstdint>
#include <string>

#include "daemon/config.hpp"
#include "daemon/sessions/connection.hpp"
#include "shm/messages.hpp"
#include "shm/process.hpp"
#include "shm/status.hpp"

namespace hicache::daemon {

// What the daemon tells about itself.
struct DaemonFacts {
  std::string name;
  ProcessIdentity process;
  std::uint64_t region_bytes = 0;
  std::uint64_t instance_epoch = 0;
};

// version_mismatch naming both sides and both ranges, or invalid_argument naming the field. `peer_pid` is for
// people.
Outcome check_hello(const Hello& hello, const DaemonFacts& facts, std::uint32_t peer_pid);

// Whether this rank may map the pool, which io_backend kernel needs: not_permitted naming the engine or the
// user, and what would have to be listed.
Outcome may_map_pool(const Hello& hello, std::uint32_t uid, const Config& config);

// Makes the connection's channel, its mapping and its eventfd.
Outcome make_channel(Connection& connection, const Config::Limits& limits);

Welcome make_welcome(const Connection& connection, const DaemonFacts& facts, const Config& config);

}  // namespace hicache::daemon
