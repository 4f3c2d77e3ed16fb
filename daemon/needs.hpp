// What a configuration needs from the machine: sizes, limits, the socket's place.
#pragma once

#include "daemon/config.hpp"
#include "shm/machine/needs.hpp"

namespace hicache::daemon {

machine::Needs needs_of(const Config& config);

}  // namespace hicache::daemon
