// Redis Cluster: which of 16,384 slots a key is in, which node serves a slot, and where a node sends us
// instead.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/storage/redis/endpoint.hpp"
#include "daemon/storage/redis/reply_reader.hpp"

namespace hicache::daemon::redis {

constexpr std::uint16_t kClusterSlots = 16384;
constexpr std::size_t kMaxNodes = 256;

// CRC16 (XMODEM) of the key modulo 16,384. Our keys have no hash tags: key_prefix can't hold braces.
std::uint16_t cluster_slot(std::string_view key);

// Slots first to last, both included, are served by `node`.
struct SlotRange {
  std::uint16_t first = 0;
  std::uint16_t last = 0;
  Endpoint node;
};
// From the answer to CLUSTER SLOTS, which `asked` gave. corrupt when it is not such an answer.
Result<std::vector<SlotRange>> parse_slots(const Reply& reply, const Endpoint& asked);

// "MOVED 3999 127.0.0.1:6381": the slot is served there. "ASK ...": this one key may be there already.
struct Redirect {
  bool ask = false;
  Endpoint node;
};
// Nothing when the error is no redirect, or names no address that can be used.
std::optional<Redirect> parse_redirect(const Reply& error, const Endpoint& asked);

}  // namespace hicache::daemon::redis
