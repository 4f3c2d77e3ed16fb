// Where an engine with a hybrid model keeps its recurrent states on the device, as its controller asks.
#pragma once

#include "shm/types.hpp"

namespace hicache {

// Called from inside the controller's calls. Every rank answers alike whether there is a state.
class StateSlots {
 public:
  virtual ~StateSlots() = default;
  // The slot whose content belongs to the end of this page, as a write begins; none when no state was kept
  // there. The slot must not change before the write's ack.
  virtual DevicePage source(const PrefixHash& page) = 0;
  // The slot that gets the states of this page, the last one of a load. They are there when the load's first
  // layer is, or with each layer for a pool of as many layers.
  virtual DevicePage target(const PrefixHash& page) = 0;
};

}  // namespace hicache
