// Somebody who has posted an operation that ends for the whole group, and waits for its end.
#pragma once

#include <cstdint>

#include "shm/types.hpp"

namespace hicache::daemon {

struct WaitingRank {
  ClientSlot client;
  Generation client_generation;
  std::uint64_t user_data = 0;
  std::uint64_t operation_sequence = 0;
};

}  // namespace hicache::daemon
