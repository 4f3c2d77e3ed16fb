// The pool on machines with several NUMA nodes: what the kernel says is read right, memory is bound where it
// should be, and slots are taken on the node of the GPUs that copy them.
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <random>

#include "daemon/coordinator/slot_allocator.hpp"
#include "daemon/numa/pool_nodes.hpp"
#include "shm/shared_memory.hpp"
#include "tests/support/memory_region.hpp"
#include "tests/support/processes.hpp"
#include "tests/unit/rig_request.hpp"

using namespace hicache;
using namespace hicache::daemon;

namespace {

std::vector<NumaNode> nodes(std::initializer_list<std::uint32_t> values) {
  std::vector<NumaNode> all;
  for (const std::uint32_t value : values) all.emplace_back(value);
  return all;
}

// Segments of `per_stripe` in a row on one node after the other.
std::vector<NumaNode> striped(std::uint32_t segments, std::uint32_t per_stripe, std::uint32_t count) {
  std::vector<NumaNode> all;
  for (std::uint32_t i = 0; i < segments; ++i) all.emplace_back(i / per_stripe % count);
  return all;
}

// How the memory at `at` is bound, as the kernel keeps it with the object. Without a policy: MPOL_DEFAULT and
// no node.
struct MemoryPolicy {
  int mode = -1;
  std::vector<NumaNode> nodes;
};
MemoryPolicy policy_at(const void* at) {
  constexpr std::size_t kBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, 4096 / kBits> mask{};
  MemoryPolicy policy;
  if (::syscall(SYS_get_mempolicy, &policy.mode, mask.data(), mask.size() * kBits, at, MPOL_F_ADDR) != 0)
    return {};
  for (std::uint32_t i = 0; i < mask.size() * kBits; ++i) {
    if ((mask[i / kBits] >> (i % kBits) & 1) != 0) policy.nodes.emplace_back(i);
  }
  return policy;
}

void write_text(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path) << text;
}

}  // namespace

TEST_CASE("a list of nodes is read as the kernel writes it, and anything else is no list") {
  CHECK(parse_node_list("0\n") == nodes({0}));
  CHECK(parse_node_list("0-3\n") == nodes({0, 1, 2, 3}));
  CHECK(parse_node_list("0,2-3,8") == nodes({0, 2, 3, 8}));
  for (const char* wrong : {"", "\n", "-1", "a", "1-", "3-1", "0,", "0,,1", "0 1", "4096", "99999999999"}) {
    CAPTURE(wrong);
    CHECK(parse_node_list(wrong).empty());
  }
}

TEST_CASE(
    "the nodes with memory and a GPU's nearest node come from sysfs; where it is silent there is none") {
  const test::TempDir directory;
  const std::filesystem::path root(directory.path());
  CHECK(memory_nodes(root.string()).empty());
  write_text(root / "has_memory", "0,2\n");
  CHECK(memory_nodes(root.string()) == nodes({0, 2}));
  write_text(root / "0000:1a:00.0" / "numa_node", "2\n");
  write_text(root / "0000:1b:00.0" / "numa_node", "-1\n");
  CHECK(node_of_pci_device("0000:1A:00.0", root.string()) == NumaNode{2});
  CHECK(node_of_pci_device("0000:1b:00.0", root.string()).is_none());
  CHECK(node_of_pci_device("0000:1c:00.0", root.string()).is_none());
}

TEST_CASE("memory that was bound before it was reserved lies where it was bound, as the kernel itself says") {
  const std::vector<NumaNode> here = memory_nodes();
  if (here.empty()) {
    WARN("this kernel does not tell its NUMA nodes: not tested");
    return;
  }
  constexpr std::uint64_t kStripe = kMiB;
  constexpr std::uint64_t kBytes = 5 * kStripe + kStripe / 2;
  const std::string name = "hicache.numa." + test::unique_region_name();
  Outcome spread = success();
  auto fd = create_named(name, kBytes, [&](int object) -> Outcome {
    if (::ftruncate(object, kBytes) != 0) return Error{Status::system_error, "ftruncate", errno};
    spread = spread_over_nodes(object, kBytes, here, kStripe);
    return success();
  });
  remove_named(name);
  REQUIRE(fd);
  if (spread.status() == Status::not_permitted) {
    WARN("this container forbids mbind: " << spread.error().message);
    return;
  }
  REQUIRE(spread);
  auto mapping = Mapping::map(fd->get(), kBytes, Mapping::Access::read_write);
  REQUIRE(mapping);
  const auto found = nodes_of_stripes(static_cast<const std::uint8_t*>(mapping->data()), kBytes, kStripe);
  REQUIRE(found.size() == 6);
  for (std::size_t i = 0; i < found.size(); ++i) CHECK(found[i] == here[i % here.size()]);
  // Where there is one node all memory lies on it, bound or not: so the binding itself is read back, at both
  // ends of each stripe.
  const auto* memory = static_cast<const std::uint8_t*>(mapping->data());
  for (std::size_t i = 0; i < found.size(); ++i) {
    const std::uint64_t end = std::min((i + 1) * kStripe, kBytes);
    for (const std::uint64_t at : {i * kStripe, end - 1}) {
      const MemoryPolicy policy = policy_at(memory + at);
      CAPTURE(i, at);
      CHECK(policy.mode == MPOL_PREFERRED);
      CHECK(policy.nodes == std::vector<NumaNode>{here[i % here.size()]});
    }
  }
}

TEST_CASE("a node that the machine does not have is refused by name") {
  auto fd = create_sealed("numa", kMiB);
  REQUIRE(fd);
  const auto refused = spread_over_nodes(fd->get(), kMiB, nodes({1000}), kMiB);
  REQUIRE_FALSE(refused);
  CHECK(refused.error().message.find("NUMA node 1000") != std::string::npos);
}

TEST_CASE("segments have their stripe's node; on one node, or where one is not known, none matters") {
  const auto two = nodes_of_segments(nodes({0, 1, 0}), 10 * kMiB, kMiB, 4 * kMiB);
  CHECK(two == nodes({0, 0, 0, 0, 1, 1, 1, 1, 0, 0}));
  CHECK(nodes_of_segments(nodes({3, 3, 3}), 10 * kMiB, kMiB, 4 * kMiB).empty());
  std::vector<NumaNode> unknown = nodes({0, 1, 0});
  unknown[1] = NumaNode::none();
  CHECK(nodes_of_segments(unknown, 10 * kMiB, kMiB, 4 * kMiB).empty());
}

TEST_CASE("a slot lies on the wished node as long as that node has room, and then anywhere") {
  const auto seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  constexpr std::uint64_t kSegment = 64 * kKiB;
  constexpr std::uint32_t kSegments = 32;
  const auto placed = striped(kSegments, 4, 3);
  test::MemoryRegion region(test::MemoryRegion::small(8, kSegments));
  SlotAllocator slots(region.tables().segments, kSegment, placed);
  const SizeClassId classes[] = {slots.class_for(4 * kKiB), slots.class_for(24 * kKiB),
                                 slots.class_for(kSegment)};
  struct Slot {
    SizeClassId cls;
    PoolOffset at;
  };
  std::vector<Slot> live;
  const auto node_of = [&](PoolOffset at) { return placed[at.value / kSegment]; };
  // Whether a class has a slot free on a node: in a segment of its own, or in one that nobody has.
  const auto has_room = [&](SizeClassId cls, NumaNode node) {
    for (std::uint32_t i = 0; i < kSegments; ++i) {
      const SegmentEntry& s = region.tables().segments[i];
      if (placed[i] != node) continue;
      const std::uint32_t owner = s.size_class.load(std::memory_order_relaxed);
      if (owner == kNone32) return true;
      if (owner == cls.value &&
          s.used_slots.load(std::memory_order_relaxed) < s.slots.load(std::memory_order_relaxed))
        return true;
    }
    return false;
  };
  std::uint32_t elsewhere = 0;
  for (int step = 0; step < 20'000; ++step) {
    if (live.empty() || random() % 7 < 4) {
      const SizeClassId cls = classes[random() % std::size(classes)];
      const NumaNode wish =
          random() % 4 == 0 ? NumaNode::none() : NumaNode{static_cast<std::uint32_t>(random() % 4)};
      const bool room = has_room(cls, wish);
      const bool possible = slots.can_allocate(cls);
      const PoolOffset slot = slots.allocate(cls, PoolOffset::none(), wish);
      REQUIRE(possible == static_cast<bool>(slot));
      if (!slot) continue;
      if (room) REQUIRE(node_of(slot) == wish);
      elsewhere += wish && node_of(slot) != wish ? 1 : 0;
      live.push_back({cls, slot});
    } else {
      std::swap(live[random() % live.size()], live.back());
      slots.free(live.back().cls, live.back().at);
      live.pop_back();
    }
  }
  CHECK(elsewhere > 0);
  for (const Slot& slot : live) slots.free(slot.cls, slot.at);
  CHECK(slots.used_bytes() == 0);
  CHECK(slots.assigned_segments() == 0);
}

TEST_CASE("pages of a group whose GPUs share a NUMA node go there, of one on several nodes anywhere") {
  // The pool's first segments are node 0's, where slots are taken when nothing is wished.
  const auto ready_nodes = [](NumaNode rank0, NumaNode rank1) {
    fuzz::CoordinatorRig rig(fuzz::RigNodes{nodes({0, 0, 1, 1}), {rank0, rank1}});
    CHECK(fuzz::run_request(rig, 1, 0, 4).written == 4);
    rig.settle();
    auto found = rig.nodes_of_ready_pages();
    rig.lose_everybody();
    rig.halt_and_check();
    return found;
  };
  CHECK(ready_nodes(NumaNode{1}, NumaNode{1}) == nodes({1, 1, 1, 1}));
  CHECK(ready_nodes(NumaNode{0}, NumaNode{1}) == nodes({0, 0, 0, 0}));
  CHECK(ready_nodes(NumaNode::none(), NumaNode{1}) == nodes({0, 0, 0, 0}));
}
