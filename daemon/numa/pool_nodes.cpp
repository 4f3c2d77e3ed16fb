#include "daemon/numa/pool_nodes.hpp"

#include <linux/mempolicy.h>
#include <spdlog/fmt/fmt.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cassert>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>

#include "shm/shared_memory.hpp"

namespace hicache::daemon {
namespace {

constexpr std::uint32_t kMaxNodes = 1024;  // as the kernel has at most
constexpr std::size_t kWordBits = 8 * sizeof(unsigned long);
using NodeMask = std::array<unsigned long, kMaxNodes / kWordBits>;

// The kernel's interface without a library for it: two calls are all that is needed.
long prefer_node(void* at, std::uint64_t bytes, NumaNode node) {
  NodeMask mask{};
  mask[node.value / kWordBits] = 1ul << (node.value % kWordBits);
  return ::syscall(SYS_mbind, at, bytes, MPOL_PREFERRED, mask.data(), kMaxNodes, 0);
}

NumaNode node_at(const std::uint8_t* at) {
  int node = -1;
  const long r = ::syscall(SYS_get_mempolicy, &node, nullptr, 0, at,
                           static_cast<unsigned long>(MPOL_F_NODE | MPOL_F_ADDR));
  return r == 0 && node >= 0 ? NumaNode{static_cast<std::uint32_t>(node)} : NumaNode::none();
}

bool read_number(std::string_view& text, std::uint32_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || value >= kMaxNodes) return false;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return true;
}

}  // namespace

std::vector<NumaNode> parse_node_list(std::string_view text) {
  std::vector<NumaNode> nodes;
  while (!text.empty() && text.back() == '\n') text.remove_suffix(1);
  while (!text.empty()) {
    std::uint32_t first = 0;
    if (!read_number(text, first)) return {};
    std::uint32_t last = first;
    if (!text.empty() && text.front() == '-') {
      text.remove_prefix(1);
      if (!read_number(text, last) || last < first) return {};
    }
    for (std::uint32_t node = first; node <= last; ++node) nodes.emplace_back(node);
    if (text.empty()) break;
    if (text.front() != ',' || text.size() == 1) return {};
    text.remove_prefix(1);
  }
  return nodes;
}

std::vector<NumaNode> memory_nodes(const std::string& sysfs) {
  std::ifstream file(sysfs + "/has_memory");
  std::string line;
  return std::getline(file, line) ? parse_node_list(line) : std::vector<NumaNode>{};
}

NumaNode node_of_pci_device(std::string bus_id, const std::string& sysfs) {
  std::transform(bus_id.begin(), bus_id.end(), bus_id.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  std::ifstream file(sysfs + "/" + bus_id + "/numa_node");
  std::string line;  // "-1" where the firmware says nothing
  if (!std::getline(file, line)) return NumaNode::none();
  const std::vector<NumaNode> nodes = parse_node_list(line);
  return nodes.size() == 1 ? nodes[0] : NumaNode::none();
}

Outcome spread_over_nodes(int fd, std::uint64_t bytes, std::span<const NumaNode> nodes,
                          std::uint64_t stripe_bytes) {
  assert(!nodes.empty() && stripe_bytes > 0);
  // The policy belongs to the object, not to this mapping.
  auto mapping = Mapping::map(fd, bytes, Mapping::Access::read_write);
  if (!mapping) return mapping.error();
  auto* const memory = static_cast<std::uint8_t*>(mapping->data());
  for (std::uint64_t stripe = 0; stripe * stripe_bytes < bytes; ++stripe) {
    const NumaNode node = nodes[stripe % nodes.size()];
    const std::uint64_t begin = stripe * stripe_bytes;
    if (prefer_node(memory + begin, std::min(stripe_bytes, bytes - begin), node) != 0) {
      return Error{errno == EPERM ? Status::not_permitted : Status::system_error,
                   fmt::format("mbind to NUMA node {}: {}", node.value, std::strerror(errno)), errno};
    }
  }
  return success();
}

std::vector<NumaNode> nodes_of_stripes(const std::uint8_t* memory, std::uint64_t bytes,
                                       std::uint64_t stripe_bytes) {
  std::vector<NumaNode> nodes;
  for (std::uint64_t at = 0; at < bytes; at += stripe_bytes) nodes.push_back(node_at(memory + at));
  return nodes;
}

std::vector<NumaNode> nodes_of_segments(std::span<const NumaNode> stripes, std::uint64_t pool_bytes,
                                        std::uint64_t segment_bytes, std::uint64_t stripe_bytes) {
  assert(stripe_bytes % segment_bytes == 0);
  const bool one = std::all_of(stripes.begin(), stripes.end(), [&](NumaNode n) { return n == stripes[0]; });
  if (one || std::find(stripes.begin(), stripes.end(), NumaNode::none()) != stripes.end()) return {};
  std::vector<NumaNode> nodes(pool_bytes / segment_bytes);
  for (std::size_t i = 0; i < nodes.size(); ++i) nodes[i] = stripes[i * segment_bytes / stripe_bytes];
  return nodes;
}

}  // namespace hicache::daemon
