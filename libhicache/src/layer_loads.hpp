// The last loads that announced their layers at one producer slot, and how they ended: the fence words alone
// can't say which of several loads failed.
//
// Not thread-safe; the session's mutex guards it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "shm/status.hpp"
#include "shm/types.hpp"

namespace hicache {

class LayerLoads {
 public:
  // The newest value must be ahead of every earlier one.
  [[nodiscard]] bool may_post(std::uint32_t value) const {
    return static_cast<std::int32_t>(value - last_) > 0;
  }
  void post(std::uint32_t value) {
    last_ = value;
    loads_[next_++ % kRemembered] = {value, std::nullopt};
  }
  void end(std::uint32_t value, Status status) {
    if (Load* load = find(value)) load->ended = status;
  }

  struct Load {
    std::uint32_t value = 0;
    std::optional<Status> ended;
  };
  // nullptr when the value was never posted or is no longer remembered. 0 is no value.
  Load* find(std::uint32_t value) {
    for (Load& load : loads_) {
      if (value != 0 && load.value == value) return &load;
    }
    return nullptr;
  }

 private:
  static constexpr std::uint32_t kRemembered = 16;
  std::array<Load, kRemembered> loads_{};
  std::uint32_t next_ = 0;
  std::uint32_t last_ = 0;
};

}  // namespace hicache
