// Where a daemon listens unless its configuration says otherwise. Daemon, library and tools must agree on it.
#pragma once

#include <string>

namespace hicache {

// /run/hicache/NAME.sock for root, else $XDG_RUNTIME_DIR/hicache/NAME.sock or /tmp/hicache-UID/NAME.sock.
std::string default_socket_path(const std::string& name);

}  // namespace hicache
