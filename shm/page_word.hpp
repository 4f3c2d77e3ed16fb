// The page word: state, flags, pins and generation of a logical page in one 64-bit atomic.
//
// Thread safety: only the coordinator stores page words. Readers in other processes load the word, use the
// page's key or offset, and load the word again: an unchanged generation and state prove that what they read
// belongs together.
//
// Life of a page (abort is its own transition and never passes through ready):
//
//   free -> reserved -> filling -> ready -> evicting -> free
//               \          \-> aborting -> free
//                \-> aborting
#pragma once

#include <cstdint>
#include <string_view>

#include "shm/types.hpp"

namespace hicache {

enum class PageState : std::uint8_t {
  free = 0,      // no owner; on the free list
  reserved = 1,  // has a slot and a key, no copy has started
  filling = 2,   // copies into its shards are on their way, or it waits for its parent to become ready
  ready = 3,     // every shard is complete and every ancestor is ready: visible to lookups
  evicting = 4,  // out of the index, slot about to be returned
  aborting = 5,  // filler failed: out of the index, waits for the last copy to land
};
constexpr std::uint8_t kPageStateCount = 6;

constexpr std::string_view to_string(PageState s) {
  switch (s) {
    case PageState::free:
      return "free";
    case PageState::reserved:
      return "reserved";
    case PageState::filling:
      return "filling";
    case PageState::ready:
      return "ready";
    case PageState::evicting:
      return "evicting";
    case PageState::aborting:
      return "aborting";
  }
  return "invalid";
}

// True where the table above has an arrow.
constexpr bool is_page_transition(PageState from, PageState to) {
  switch (from) {
    case PageState::free:
      return to == PageState::reserved;
    case PageState::reserved:
      return to == PageState::filling || to == PageState::aborting;
    case PageState::filling:
      return to == PageState::ready || to == PageState::aborting;
    case PageState::ready:
      return to == PageState::evicting;
    case PageState::evicting:
    case PageState::aborting:
      return to == PageState::free;
  }
  return false;
}

// Decoded page word. Bits: 0-3 state, 4-7 flags, 8-31 pins, 32-63 generation.
struct PageWord {
  static constexpr std::uint32_t kMaxPins = (1u << 24) - 1;
  static constexpr std::uint8_t kDirty = 1;  // not in storage yet
  static constexpr std::uint8_t kQuarantined =
      2;  // its bytes were found wrong: evicting for as long as the daemon lives
  static constexpr std::uint8_t kStoring = 4;  // storage reads its bytes: it is neither evicted nor freed
  static constexpr std::uint8_t kStates = 8;   // it carries the states of its namespace's trailing pools
  // Every bit means something, so none has to be refused by whoever reads a word.
  static_assert((kDirty | kQuarantined | kStoring | kStates) == 0xf);

  PageState state = PageState::free;
  std::uint8_t flags = 0;
  std::uint32_t pins = 0;
  Generation generation{0};

  static constexpr PageWord decode(std::uint64_t raw) {
    return PageWord{static_cast<PageState>(raw & 0xf), static_cast<std::uint8_t>((raw >> 4) & 0xf),
                    static_cast<std::uint32_t>((raw >> 8) & kMaxPins),
                    Generation{static_cast<std::uint32_t>(raw >> 32)}};
  }
  [[nodiscard]] constexpr std::uint64_t encode() const {
    return (static_cast<std::uint64_t>(state) & 0xf) | ((std::uint64_t{flags} & 0xf) << 4) |
           ((std::uint64_t{pins} & kMaxPins) << 8) | (std::uint64_t{generation.value} << 32);
  }
  // A reader may use what the page holds.
  [[nodiscard]] constexpr bool readable() const { return state == PageState::ready; }
  friend constexpr bool operator==(const PageWord&, const PageWord&) = default;
};

}  // namespace hicache
