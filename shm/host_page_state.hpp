// The states of an engine's handles for host pages, as SGLang's host pool names them. The engine keeps them
// (hicache/controller/host_page_states.hpp); what is shared is how many are in each, the handles that changed
// last, and the last refusal.
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

// What an engine asks of a handle.
enum class HostPageCall : std::uint8_t {
  none = 0,
  free = 1,
  evict_host = 2,
  clear = 3,
  protect_write = 4,
  protect_load = 5,
  complete_io = 6,
  abort_io = 7,
  update_backup = 8,
  update_synced = 9,
  update_prefetch = 10,
};
constexpr std::size_t kHostPageCalls = 11;

constexpr std::string_view to_string(HostPageCall call) {
  constexpr std::string_view names[kHostPageCalls] = {
      "none",        "free",     "evict_host",    "clear",         "protect_write",  "protect_load",
      "complete_io", "abort_io", "update_backup", "update_synced", "update_prefetch"};
  const auto number = static_cast<std::size_t>(call);
  return number < kHostPageCalls ? names[number] : "unknown_call";
}

// The last wrong transition that was refused.
struct RefusedTransition {
  HostPageCall call = HostPageCall::none;
  HostPageState state = HostPageState::idle;  // in which the handle was
  std::uint32_t page = 0xffffffffu;           // the handle, in pages; none: the slots named no whole pages

  // One word, so that a reader in another process sees one refusal and not halves of two.
  [[nodiscard]] constexpr std::uint64_t encode() const {
    return std::uint64_t{page} << 32 | std::uint64_t{static_cast<std::uint8_t>(call)} << 8 |
           static_cast<std::uint8_t>(state);
  }
  // Call and state may be none that there is: to_string says so.
  static constexpr RefusedTransition decode(std::uint64_t word) {
    return {static_cast<HostPageCall>(word >> 8 & 0xff), static_cast<HostPageState>(word & 0xff),
            static_cast<std::uint32_t>(word >> 32)};
  }
};

// One handle that is in use.
struct HostHandle {
  std::uint32_t page = 0;
  HostPageState state = HostPageState::idle;  // idle: there is none
  std::uint64_t key = 0;                      // first word of its page's hash

  [[nodiscard]] constexpr std::uint64_t encode() const {
    return std::uint64_t{page} << 32 | static_cast<std::uint8_t>(state);
  }
  static constexpr HostHandle decode(std::uint64_t word, std::uint64_t key) {
    return {static_cast<std::uint32_t>(word >> 32), static_cast<HostPageState>(word & 0xff), key};
  }
};
constexpr std::size_t kShownHandles = 15;

// What an engine says about its handles, once a scheduling step.
struct HostPageCounts {
  std::array<std::uint32_t, kHostPageStates> pages{};  // by state
  std::uint32_t refused = 0;                           // wrong transitions since the controller was made
  RefusedTransition last_refusal;
  std::uint32_t changes = 0;                        // of a state, of any handle; wraps
  std::array<HostHandle, kShownHandles> handles{};  // in use, changed last, the newest first
};

}  // namespace hicache
