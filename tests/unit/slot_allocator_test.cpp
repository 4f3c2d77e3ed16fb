#include <map>
#include <random>
#include <set>

#include "daemon/coordinator/slot_allocator.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/memory_region.hpp"

namespace hicache::daemon {
namespace {
constexpr std::uint64_t kSegment = 64 * kKiB;

struct Pool {
  explicit Pool(std::uint32_t segments, std::uint64_t segment_bytes = kSegment)
      : region(test::MemoryRegion::small(8, segments)), slots(region.tables().segments, segment_bytes) {}
  test::MemoryRegion region;
  SlotAllocator slots;
};
}  // namespace

TEST_CASE("a request gets consecutive slots from an empty pool") {
  Pool pool(4);
  const SizeClassId cls = pool.slots.class_for(8 * kKiB);
  PoolOffset near;
  for (std::uint64_t i = 0; i < 8; ++i) {
    near = pool.slots.allocate(cls, near);
    CHECK(near.value == i * 8 * kKiB);
  }
}

TEST_CASE("a freed neighbour is taken before any other slot") {
  Pool pool(2);
  const SizeClassId cls = pool.slots.class_for(4 * kKiB);
  std::vector<PoolOffset> slots;
  for (int i = 0; i < 32; ++i) slots.push_back(pool.slots.allocate(cls, PoolOffset::none()));
  pool.slots.free(cls, slots[20]);
  pool.slots.free(cls, slots[5]);
  CHECK(pool.slots.allocate(cls, slots[4]) == slots[5]);
  CHECK(pool.slots.allocate(cls, slots[4]) == slots[20]);
  CHECK(pool.slots.allocate(cls, slots[4]).is_none());
}

TEST_CASE("only the usable part of the pool gets new slots, and what was taken before keeps serving") {
  Pool pool(4);
  const SizeClassId cls = pool.slots.class_for(32 * kKiB);  // two a segment
  const SizeClassId other = pool.slots.class_for(kSegment);
  pool.slots.set_usable_bytes(0);
  CHECK_FALSE(pool.slots.can_allocate(cls));
  CHECK(pool.slots.allocate(cls, PoolOffset::none()).is_none());
  pool.slots.set_usable_bytes(2 * kSegment - 1);  // a segment counts when all of it does
  const PoolOffset first = pool.slots.allocate(cls, PoolOffset::none());
  CHECK(first == PoolOffset{0});
  CHECK_FALSE(pool.slots.can_allocate(other));
  pool.slots.set_usable_bytes(2 * kSegment);
  CHECK(pool.slots.allocate(other, PoolOffset::none()) == PoolOffset{kSegment});
  pool.slots.set_usable_bytes(0);
  CHECK(pool.slots.allocate(cls, first) == PoolOffset{32 * kKiB});
  pool.slots.set_usable_bytes(4 * kSegment);
  CHECK(pool.slots.can_allocate(other));
}

TEST_CASE("an empty segment goes back and serves another size class") {
  Pool pool(1);
  const SizeClassId small = pool.slots.class_for(4 * kKiB);
  const SizeClassId large = pool.slots.class_for(32 * kKiB);
  const PoolOffset a = pool.slots.allocate(small, PoolOffset::none());
  CHECK_FALSE(pool.slots.can_allocate(large));
  CHECK(pool.slots.allocate(large, PoolOffset::none()).is_none());
  pool.slots.free(small, a);
  CHECK(pool.slots.assigned_segments() == 0);
  CHECK(pool.slots.can_allocate(large));
  CHECK_FALSE(pool.slots.allocate(large, PoolOffset::none()).is_none());
}

TEST_CASE("a slot larger than a segment takes a span and never crosses a 1 GiB line") {
  Pool pool(8, 256 * kMiB);
  const SizeClassId cls = pool.slots.class_for(600 * kMiB);  // 3 segments: one span in each GiB
  const PoolOffset a = pool.slots.allocate(cls, PoolOffset::none());
  const PoolOffset b = pool.slots.allocate(cls, a);
  REQUIRE(a);
  REQUIRE(b);
  for (const PoolOffset slot : {a, b}) CHECK(slot.value / kGiB == (slot.value + 600 * kMiB - 1) / kGiB);
  CHECK(pool.slots.allocate(cls, b).is_none());
  CHECK(pool.slots.class_for(3 * kGiB).is_none());
  CHECK(pool.slots.class_for(1 * kGiB + 4 * kKiB).is_none());
}

TEST_CASE("random allocation in several classes never gives a byte to two slots") {
  const auto seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  Pool pool(64);
  const std::uint64_t sizes[] = {4 * kKiB, 12 * kKiB, 20 * kKiB, 64 * kKiB, 160 * kKiB};
  struct Slot {
    SizeClassId cls;
    std::uint64_t bytes;
  };
  std::map<std::uint64_t, Slot> live;
  std::uint64_t used = 0;
  PoolOffset last;
  for (int step = 0; step < 30'000; ++step) {
    if (random() % 5 < 3) {
      const std::uint64_t bytes = sizes[random() % std::size(sizes)];
      const SizeClassId cls = pool.slots.class_for(bytes);
      const bool possible = pool.slots.can_allocate(cls);
      const PoolOffset slot = pool.slots.allocate(cls, random() % 2 ? last : PoolOffset::none());
      REQUIRE(possible == static_cast<bool>(slot));
      if (!slot) continue;
      REQUIRE(slot.value % kPoolAlignment == 0);
      REQUIRE(slot.value + bytes <= 64 * kSegment);
      const auto after = live.lower_bound(slot.value);
      if (after != live.end()) REQUIRE(slot.value + bytes <= after->first);
      if (after != live.begin())
        REQUIRE(std::prev(after)->first + std::prev(after)->second.bytes <= slot.value);
      live.emplace(slot.value, Slot{cls, bytes});
      used += bytes;
      last = slot;
    } else if (!live.empty()) {
      auto victim = live.lower_bound(random() % (64 * kSegment));
      if (victim == live.end()) victim = live.begin();
      pool.slots.free(victim->second.cls, PoolOffset{victim->first});
      used -= victim->second.bytes;
      live.erase(victim);
    }
    REQUIRE(pool.slots.used_bytes() == used);
  }
  for (const auto& [offset, slot] : live) pool.slots.free(slot.cls, PoolOffset{offset});
  CHECK(pool.slots.used_bytes() == 0);
  CHECK(pool.slots.assigned_segments() == 0);
}

}  // namespace hicache::daemon
