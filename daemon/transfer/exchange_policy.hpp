// When a TP group loads together pages that all its ranks need. Pure code.
#pragma once

#include <algorithm>
#include <cstdint>

namespace hicache::daemon {

// What the configuration asks for (mla.load).
enum class MlaLoad : std::uint8_t { automatic, direct, exchange };

struct ExchangePolicy {
  MlaLoad mode = MlaLoad::automatic;
  std::uint64_t wait_ns = 0;  // how long a rank waits for the others at most

  // What one link of PCIe 5 x16 moves; only magnitudes count here.
  static constexpr double kLinkBytesPerNs = 55;
  // With less to gain, ranks do not wait for each other.
  static constexpr double kWorthNs = 50'000;

  // What a group on this many GPUs saves when each link brings its share instead of everything.
  [[nodiscard]] static constexpr double saved_ns(std::uint64_t bytes, std::uint32_t devices) {
    return static_cast<double>(bytes) / kLinkBytesPerNs * (1.0 - 1.0 / devices);
  }
  [[nodiscard]] constexpr bool wants(std::uint64_t bytes, std::uint32_t devices) const {
    if (mode == MlaLoad::direct || devices < 2) return false;
    return mode == MlaLoad::exchange || saved_ns(bytes, devices) >= kWorthNs;
  }
  // A rank that loads alone after this has lost no more time than it could have won.
  [[nodiscard]] constexpr std::uint64_t patience_ns(std::uint64_t bytes, std::uint32_t devices) const {
    if (mode == MlaLoad::exchange) return wait_ns;
    return std::min(wait_ns, static_cast<std::uint64_t>(saved_ns(bytes, devices)));
  }
};

}  // namespace hicache::daemon
