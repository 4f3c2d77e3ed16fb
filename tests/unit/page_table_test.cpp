#include "daemon/coordinator/page_table.hpp"

#include "daemon/coordinator/lease_table.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/memory_region.hpp"

namespace hicache::daemon {
namespace {

struct Fixture {
  explicit Fixture(std::uint32_t capacity, std::uint32_t segments = 16)
      : region(test::MemoryRegion::small(capacity, segments)),
        policy(make_eviction_policy(EvictionPolicyName::lru)),
        stats(region.tables().counters),
        pages(region.tables(), 64 * kKiB, *policy, stats),
        leases(region.tables(), pages, stats),
        size_class(pages.slots().class_for(4 * kKiB)) {}

  static PrefixHash key(std::uint64_t n) { return PrefixHash{{n * 0x9e3779b97f4a7c15ull, n, 7, 9}}; }

  PageId fill(std::uint64_t n, PageId parent, std::uint32_t depth) {
    NewPage fresh;
    fresh.key = key(n);
    fresh.namespace_id = NamespaceId{0};
    fresh.size_class = size_class;
    fresh.parent = parent;
    fresh.depth = depth;
    return pages.allocate(fresh);
  }
  PageId ready(std::uint64_t n, PageId parent, std::uint32_t depth) {
    const PageId page = fill(n, parent, depth);
    REQUIRE(page);
    REQUIRE(pages.complete_shard(page, 0, 1));
    REQUIRE(pages.publishable(page, 1));
    pages.publish(page);
    pages.stamp(page);
    return page;
  }

  test::MemoryRegion region;
  std::unique_ptr<EvictionPolicy> policy;
  Stats stats;
  PageTable pages;
  LeaseTable leases;
  SizeClassId size_class;
};

}  // namespace

TEST_CASE("a page is visible to readers only once it is ready") {
  Fixture f(8);
  const IndexReader reader(f.region.const_tables(), 0x5eed);
  const PrefixHash keys[] = {Fixture::key(1)};
  const PageId page = f.fill(1, PageId::none(), 0);
  CHECK(reader.probe(keys, NamespaceId{0}).leading == 0);
  CHECK(f.pages.find(keys[0], NamespaceId{0}) == page);
  f.pages.complete_shard(page, 0, 1);
  f.pages.publish(page);
  CHECK(reader.probe(keys, NamespaceId{0}).leading == 1);
  CHECK(reader.probe(keys, NamespaceId{1}).leading == 0);
}

TEST_CASE("a page is publishable only when every shard is complete and its parent is ready") {
  Fixture f(8);
  const PageId parent = f.fill(1, PageId::none(), 0);
  const PageId child = f.fill(2, parent, 1);
  CHECK_FALSE(f.pages.complete_shard(child, 0, 2));
  CHECK_FALSE(f.pages.complete_shard(child, 0, 2));  // the same shard twice is one shard
  CHECK(f.pages.complete_shard(child, 1, 2));
  CHECK_FALSE(f.pages.publishable(child, 2));
  f.pages.complete_shard(parent, 0, 2);
  f.pages.complete_shard(parent, 1, 2);
  CHECK(f.pages.publishable(parent, 2));
  f.pages.publish(parent);
  CHECK(f.pages.publishable(child, 2));
}

TEST_CASE("a prefix is evicted from its end: a page with cached children stays") {
  Fixture f(8);
  const PageId a = f.ready(1, PageId::none(), 0);
  const PageId b = f.ready(2, a, 1);
  const PageId c = f.ready(3, b, 2);
  CHECK_FALSE(f.pages.evictable(a));
  CHECK_FALSE(f.pages.evictable(b));
  CHECK(f.pages.evict_one(EvictReason::request));
  CHECK(f.pages.state(c) == PageState::free);
  CHECK(f.pages.evictable(b));
  CHECK(f.pages.evict_one(EvictReason::request));
  CHECK(f.pages.evict_one(EvictReason::request));
  CHECK_FALSE(f.pages.evict_one(EvictReason::request));
  CHECK(f.pages.resident() == 0);
  CHECK(f.stats.get(Counter::evicted) == 3);
}

TEST_CASE(
    "exactly the capacity is resident before a page is evicted, and one eviction makes room for one page") {
  Fixture f(4);
  PageId first = f.ready(1, PageId::none(), 0);
  for (std::uint64_t n = 2; n <= 4; ++n) f.ready(n, PageId::none(), 0);
  CHECK(f.stats.get(Counter::evicted) == 0);
  CHECK(f.pages.resident() == 4);
  f.ready(5, PageId::none(), 0);
  CHECK(f.stats.get(Counter::evicted) == 1);
  CHECK(f.pages.find(Fixture::key(1), NamespaceId{0}).is_none());
  CHECK(f.pages.find(Fixture::key(2), NamespaceId{0}));
  CHECK(f.pages.word(first).generation == Generation{2});  // the new page lives in the old one's entry
}

TEST_CASE("pinned pages are never evicted, and nothing is allocated when all are pinned") {
  Fixture f(2);
  const PageId a = f.ready(1, PageId::none(), 0);
  const PageId b = f.ready(2, PageId::none(), 0);
  f.pages.pin(a);
  f.pages.pin(b);
  CHECK(f.fill(3, PageId::none(), 0).is_none());
  f.pages.unpin(b);
  const PageId c = f.fill(3, PageId::none(), 0);
  CHECK(c == b);
  CHECK(f.pages.state(a) == PageState::ready);
}

TEST_CASE("an aborted page leaves the index at once and its slot only when the copies have ended") {
  Fixture f(4);
  const PageId page = f.fill(1, PageId::none(), 0);
  const std::uint64_t used = f.pages.slots().used_bytes();
  f.pages.abort(page);
  CHECK(f.pages.find(Fixture::key(1), NamespaceId{0}).is_none());
  CHECK(f.pages.slots().used_bytes() == used);
  f.pages.finish_abort(page);
  CHECK(f.pages.slots().used_bytes() == 0);
  CHECK(f.pages.state(page) == PageState::free);
}

TEST_CASE("when another size class fills the pool its oldest pages make room") {
  Fixture f(64, 2);  // two segments of 16 small slots
  for (std::uint64_t n = 0; n < 32; ++n) f.ready(100 + n, PageId::none(), 0);
  const SizeClassId large = f.pages.slots().class_for(64 * kKiB);
  NewPage fresh;
  fresh.key = Fixture::key(1);
  fresh.namespace_id = NamespaceId{1};
  fresh.size_class = large;
  const PageId page = f.pages.allocate(fresh);
  REQUIRE(page);
  CHECK(f.pages.offset(page).value % (64 * kKiB) == 0);
  CHECK(f.stats.get(Counter::evicted) >= 16);
  CHECK(f.pages.find(Fixture::key(100 + 31), NamespaceId{0}));  // the newest small page is still there
}

TEST_CASE("a lease is one use: its pages are stamped last to first and the first is the most recent") {
  Fixture f(8);
  const PageId a = f.ready(1, PageId::none(), 0);
  const PageId b = f.ready(2, a, 1);
  Lease* lease = f.leases.open(GroupSlot{0}, NamespaceId{0}, 1, 1, {Fixture::key(1), Fixture::key(2)});
  REQUIRE(lease != nullptr);
  f.leases.pin(*lease, 0, a);
  f.leases.pin(*lease, 1, b);
  const auto& entries = f.region.tables().pages;
  const std::uint32_t uses = entries[a.value].uses.load();
  f.leases.stamp_all(*lease);
  CHECK(entries[a.value].last_use.load() == entries[b.value].last_use.load() + 1);
  CHECK(entries[a.value].uses.load() == uses + 1);
  f.leases.close(*lease);
  CHECK(f.pages.word(a).pins == 0);
  CHECK(f.stats.get(Counter::pinned_pages) == 0);
}

TEST_CASE("lease ids of closed leases are stale, ids that never were are unknown") {
  Fixture f(8);
  Lease* lease = f.leases.open(GroupSlot{0}, NamespaceId{0}, 1, 1, {Fixture::key(1)});
  const LeaseId id = lease->id();
  CHECK(f.leases.find(id).ok());
  f.leases.close(*lease);
  CHECK(f.leases.find(id).status() == Status::stale_generation);
  CHECK(f.leases.find(LeaseId{id.slot(), Generation{99}}).status() == Status::unknown_lease);
  CHECK(f.leases.find(LeaseId{LeaseSlot{5000}, Generation{1}}).status() == Status::unknown_lease);
  CHECK(f.leases.find(LeaseId{0}).status() == Status::unknown_lease);
}

TEST_CASE("dropping single pins keeps the lease's chunks and the pages' counts in step") {
  Fixture f(64);
  std::vector<PrefixHash> keys;
  for (std::uint64_t n = 0; n < 40; ++n) keys.push_back(Fixture::key(n));
  Lease* lease = f.leases.open(GroupSlot{0}, NamespaceId{0}, 1, 1, keys);
  for (std::uint32_t n = 0; n < 40; ++n) f.leases.pin(*lease, n, f.ready(n, PageId::none(), 0));
  for (const std::uint32_t position : {39u, 0u, 13u, 26u, 12u, 38u}) f.leases.drop_pin(*lease, position);
  const auto& entry = f.region.tables().leases[lease->slot.value];
  CHECK(entry.pins.load() == 34);
  std::uint32_t in_chunks = 0;
  for (std::uint32_t c = entry.first_chunk.load(); c != kNone32;
       c = f.region.tables().pin_chunks[c].next.load()) {
    in_chunks += f.region.tables().pin_chunks[c].count.load();
  }
  CHECK(in_chunks == 34);
  for (std::uint32_t n = 0; n < 40; ++n) {
    const bool dropped = n == 39 || n == 0 || n == 13 || n == 26 || n == 12 || n == 38;
    CHECK(f.pages.word(f.pages.find(keys[n], NamespaceId{0})).pins == (dropped ? 0 : 1));
  }
  f.leases.close(*lease);
  CHECK(f.stats.get(Counter::pinned_pages) == 0);
  CHECK(f.leases.can_pin(64));
}

}  // namespace hicache::daemon
