// The states of an engine's handles for host pages, as SGLang's host pool names them. The engine keeps them
// (hicache/controller/host_page_states.hpp); what is shared is how many are in each.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace hicache {

enum class HostPageState : std::uint8_t { idle = 0, reserved = 1, protected_io = 2, synced = 3, backup = 4 };
constexpr std::size_t kHostPageStates = 5;

constexpr std::string_view to_string(HostPageState state) {
  switch (state) {
    case HostPageState::idle:
      return "idle";
    case HostPageState::reserved:
      return "reserved";
    case HostPageState::protected_io:
      return "protected";
    case HostPageState::synced:
      return "synced";
    case HostPageState::backup:
      return "backup";
  }
  return "unknown_state";
}

// What an engine says about its handles, once a scheduling step.
struct HostPageCounts {
  std::array<std::uint32_t, kHostPageStates> pages{};  // by state
  std::uint32_t refused = 0;                           // wrong transitions since the controller was made
};

}  // namespace hicache
