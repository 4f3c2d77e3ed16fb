#include "shm/version.hpp"

#include "shm/protocol.hpp"
#include "shm/region_layout.hpp"

namespace hicache {

std::string version_text(const std::string& program) {
  return program + " " HICACHE_VERSION " (protocol " + std::to_string(kProtocolMin) + " to " +
         std::to_string(kProtocolMax) + ", layout " + std::to_string(kLayoutMajor) + "." +
         std::to_string(kLayoutMinor) + ")";
}

}  // namespace hicache
