// Where the pool's memory lies on machines with several NUMA nodes: stripe after stripe on one node after the
// other, each bound before its memory is reserved, so that every node has a part of the pool. No slot crosses
// a stripe, and the slot allocator takes slots on the node of the GPUs that will copy them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shm/status.hpp"
#include "shm/types.hpp"

namespace hicache::daemon {

// Slots never cross a 1 GiB line of the pool: so a slot lies on one node.
inline constexpr std::uint64_t kNumaStripeBytes = kGiB;

// Nodes of a list as the kernel writes it ("0-1,4"). Empty for what is no such list.
std::vector<NumaNode> parse_node_list(std::string_view text);
// This machine's nodes that have memory, ascending; empty where the kernel doesn't say.
std::vector<NumaNode> memory_nodes(const std::string& sysfs = "/sys/devices/system/node");

// The node nearest to a device on the PCI bus ("0000:17:00.0", in any case); none where the machine has one
// node or does not say.
NumaNode node_of_pci_device(std::string bus_id, const std::string& sysfs = "/sys/bus/pci/devices");

// Makes stripe i of the shared memory object prefer node i mod nodes.size(), for memory that is reserved from
// now on: a node without room passes a stripe on to others. The object has its size. `stripe_bytes` is a
// multiple of the memory page's size. not_permitted or system_error with what the kernel refused.
Outcome spread_over_nodes(int fd, std::uint64_t bytes, std::span<const NumaNode> nodes,
                          std::uint64_t stripe_bytes = kNumaStripeBytes);

// The node on which each stripe of mapped and reserved memory lies, as its first bytes tell; none where the
// kernel doesn't say.
std::vector<NumaNode> nodes_of_stripes(const std::uint8_t* memory, std::uint64_t bytes,
                                       std::uint64_t stripe_bytes = kNumaStripeBytes);

// The node of each of the pool's segments, for the slot allocator; empty when the stripes lie on one node, or
// where one is not known: then no node is better than another.
std::vector<NumaNode> nodes_of_segments(std::span<const NumaNode> stripes, std::uint64_t pool_bytes,
                                        std::uint64_t segment_bytes,
                                        std::uint64_t stripe_bytes = kNumaStripeBytes);

}  // namespace hicache::daemon
