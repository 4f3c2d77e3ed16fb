// Who moves a rank's pages between its device buffers and the pool.
#pragma once

#include <cstdint>

namespace hicache {

enum class IoBackend : std::uint8_t {
  kernel,  // the rank: its kernels, or its CPU for host memory, on the pool that it maps; must be allowed
  direct,  // the daemon
};

}  // namespace hicache
