// The daemon's socket: one thread that greets clients, makes their channels, passes descriptors and requests
// on, and notices when a client goes. It decides nothing about pages and never blocks: a client whose socket
// is full, that floods, or that sends anything out of turn is closed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "daemon/config.hpp"
#include "daemon/coordinator/requests.hpp"
#include "daemon/sessions/registration.hpp"
#include "shm/status.hpp"

namespace hicache::daemon {

struct SessionServerOptions {
  Config config;
  std::string socket_path;
  int control_fd = -1;  // read-only descriptor of the control region; stays the caller's
  int pool_fd = -1;     // of the pool, for ranks that may map it; stays the caller's
  std::uint64_t region_bytes = 0;
  std::uint64_t instance_epoch = 0;
};

class SessionServer {
 public:
  using Post = std::function<void(CoordinatorRequest)>;

  // Listens and starts the thread. `post` hands requests to the coordinator; it and `registration` outlive
  // the server.
  static Result<std::unique_ptr<SessionServer>> start(const SessionServerOptions& options, Post post,
                                                      Registration& registration);
  // Closes every connection and removes the socket.
  ~SessionServer();
  SessionServer(const SessionServer&) = delete;
  SessionServer& operator=(const SessionServer&) = delete;

  // New values of the keys that may change. From any thread.
  void reload(const Config& config);
  // Refuses every further Hello with shutting_down; sessions go on. From any thread.
  void drain();

 private:
  class Impl;
  explicit SessionServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace hicache::daemon
