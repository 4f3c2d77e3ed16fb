#include "shm/socket_path.hpp"

#include <unistd.h>

#include <cstdlib>

namespace hicache {

std::string default_socket_path(const std::string& name) {
  const std::string file = name + ".sock";
  const auto uid = ::geteuid();
  if (uid == 0) return "/run/hicache/" + file;
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  if (runtime != nullptr && runtime[0] == '/') return std::string(runtime) + "/hicache/" + file;
  return "/tmp/hicache-" + std::to_string(uid) + "/" + file;
}

}  // namespace hicache
