#include "daemon/storage/redis/cluster.hpp"

#include <array>
#include <charconv>
#include <map>

namespace hicache::daemon::redis {
namespace {

constexpr std::uint16_t kPolynomial = 0x1021;

constexpr std::array<std::uint16_t, 256> make_crc_table() {
  std::array<std::uint16_t, 256> table{};
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    std::uint32_t crc = i << 8;
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 0x8000) != 0 ? (crc << 1) ^ kPolynomial : crc << 1;
    table[i] = static_cast<std::uint16_t>(crc);
  }
  return table;
}
constexpr auto kCrcTable = make_crc_table();

Error not_slots(const std::string& why) {
  return {Status::corrupt, "the answer to CLUSTER SLOTS has " + why, 0};
}

bool is_slot(const Reply& reply) {
  return reply.kind == ReplyKind::integer && reply.integer >= 0 && reply.integer < kClusterSlots;
}

}  // namespace

std::uint16_t cluster_slot(std::string_view key) {
  std::uint32_t crc = 0;
  for (const char c : key) {
    crc = ((crc << 8) ^ kCrcTable[((crc >> 8) ^ static_cast<std::uint8_t>(c)) & 0xff]) & 0xffff;
  }
  return static_cast<std::uint16_t>(crc % kClusterSlots);
}

// [[first, last, [host, port, ...], replicas ...], ...]
Result<std::vector<SlotRange>> parse_slots(const Reply& reply, const Endpoint& asked) {
  if (reply.kind != ReplyKind::array) return not_slots("another type");
  std::vector<SlotRange> ranges;
  std::map<std::string, Endpoint> nodes;  // by the address as given: slots in pieces name a node often
  for (const Reply& item : reply.items) {
    if (item.kind != ReplyKind::array || item.items.size() < 3) return not_slots("a range without a node");
    const Reply& first = item.items[0];
    const Reply& last = item.items[1];
    const Reply& node = item.items[2];
    if (!is_slot(first) || !is_slot(last) || first.integer > last.integer) {
      return not_slots("a range outside 0 to 16383");
    }
    if (node.kind != ReplyKind::array || node.items.size() < 2 || node.items[1].kind != ReplyKind::integer ||
        node.items[1].integer < 0 || node.items[1].integer > 65535) {
      return not_slots("a node without an address");
    }
    const std::string& host = node.items[0].text;  // empty for nil: the one that was asked
    const auto port = static_cast<std::uint16_t>(node.items[1].integer);
    auto known = nodes.find(host + " " + std::to_string(port));
    if (known == nodes.end()) {
      auto endpoint = make_endpoint(host, port, asked);
      if (!endpoint) return not_slots("a node whose address is not numeric");
      if (nodes.size() == kMaxNodes) return not_slots("more than " + std::to_string(kMaxNodes) + " nodes");
      known = nodes.emplace(host + " " + std::to_string(port), std::move(*endpoint)).first;
    }
    ranges.push_back(
        {static_cast<std::uint16_t>(first.integer), static_cast<std::uint16_t>(last.integer), known->second});
  }
  return ranges;
}

std::optional<Redirect> parse_redirect(const Reply& error, const Endpoint& asked) {
  if (error.kind != ReplyKind::error) return std::nullopt;
  const std::string_view code = error_code(error);
  if (code != "MOVED" && code != "ASK") return std::nullopt;
  const std::string_view text = error.text;
  const std::size_t blank = text.rfind(' ');
  const std::size_t colon = text.rfind(':');
  if (blank <= code.size() || colon == std::string_view::npos || colon < blank) return std::nullopt;
  std::string host(text.substr(blank + 1, colon - blank - 1));
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  const std::string_view digits = text.substr(colon + 1);
  std::uint16_t port = 0;
  const auto [end, failed] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
  if (failed != std::errc{} || end != digits.data() + digits.size()) return std::nullopt;
  auto node = make_endpoint(host, port, asked);
  if (!node) return std::nullopt;
  return Redirect{code == "ASK", std::move(*node)};
}

}  // namespace hicache::daemon::redis
