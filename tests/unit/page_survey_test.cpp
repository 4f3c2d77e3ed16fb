// The survey of a takeover against tables that hold anything at all: it never leaves their bounds, and what
// it keeps is always a forest of sound pages that the page table can adopt.
#include "daemon/coordinator/page_survey.hpp"

#include <random>

#include "daemon/coordinator/lease_table.hpp"
#include "daemon/coordinator/namespace_table.hpp"
#include "daemon/coordinator/page_table.hpp"
#include "shm/page_seal.hpp"
#include "shm/process.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/memory_region.hpp"

namespace hicache::daemon {
namespace {

constexpr std::uint64_t kSegment = 64 * kKiB;
constexpr std::uint32_t kSegments = 16;
constexpr std::uint32_t kPages = 64;

// Entries that are sound or nearly so: random bytes alone would never get past the first check.
void scatter(const Tables& t, std::mt19937_64& random) {
  const auto one_in = [&](std::uint32_t n) { return random() % n == 0; };
  for (NamespaceEntry& ns : t.namespaces) {
    ns.state = static_cast<std::uint32_t>(random() % 4);
    ns.shards = static_cast<std::uint32_t>(1 + random() % 2);
    ns.shard_stride = 4096 * (1 + random() % 3) + (one_in(9) ? 512 : 0);
    ns.shard_bytes = ns.shard_stride - (one_in(40) ? 5000 : 96);
    ns.page_tokens = one_in(40) ? 0 : 16;
    ns.layers = one_in(40) ? 1000 : 2;
    ns.successor = static_cast<std::uint32_t>(random() % (t.namespaces.size() + 2));
    ns.slot_bytes = one_in(12) ? random() : ns.shard_stride * ns.shards;
    for (A64& word : ns.digest) word = random() % 5;
  }
  for (std::uint32_t i = 0; i < t.pages.size(); ++i) {
    PageEntry& p = t.pages[i];
    const auto state = one_in(4) ? static_cast<PageState>(random() % 16) : PageState::ready;
    p.word =
        PageWord{state, static_cast<std::uint8_t>(one_in(10) ? random() % 16 : 1), 3, Generation{1}}.encode();
    for (A64& word : p.key) word = random() % 3;
    p.key[0] = random() % 100;
    p.namespace_id = static_cast<std::uint32_t>(random() % (one_in(10) ? 1000 : t.namespaces.size()));
    p.pool_offset = one_in(10) ? random() : (random() % (kSegments * 16)) * 4096;
    p.parent = one_in(2) ? kNone32 : static_cast<std::uint32_t>(random() % (kPages + 4));
    p.parent_generation = 1;
    p.depth = p.parent == kNone32 ? 0 : static_cast<std::uint32_t>(1 + random() % 3);
    p.children = static_cast<std::uint32_t>(random());
    p.chain_next = static_cast<std::uint32_t>(random());
    p.shards_done =
        one_in(8)
            ? random()
            : (p.namespace_id < t.namespaces.size() ? (1ull << t.namespaces[p.namespace_id].shards) - 1 : 1);
    p.seal = one_in(20) ? random() : page_seal(p);
    p.leased_to = one_in(2) ? 0 : 7 + random() % 2;
  }
  // This process maps the pool, and one that has ended did.
  const ProcessIdentity self = ProcessIdentity::self();
  t.clients[0].state = static_cast<std::uint32_t>(ClientState::attached);
  t.clients[0].pid = self.pid;
  t.clients[0].start_ticks = self.start_ticks;
  t.clients[0].pool_tag = 7;
  t.clients[1].state = static_cast<std::uint32_t>(ClientState::dying);
  t.clients[1].pid = self.pid;
  t.clients[1].start_ticks = self.start_ticks + 1;
  t.clients[1].pool_tag = 8;
}

}  // namespace

TEST_CASE("whatever the tables hold, a takeover ends with a page table that works") {
  std::uint64_t kept = 0;
  std::uint64_t held = 0;
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    test::MemoryRegion region(test::MemoryRegion::small(kPages, kSegments));
    std::mt19937_64 random(seed);
    if (seed % 10 == 0) {
      auto* bytes = reinterpret_cast<std::uint64_t*>(region.tables().pages.data());
      for (std::size_t i = 0; i < kPages * sizeof(PageEntry) / 8; ++i) bytes[i] = random();
    } else {
      scatter(region.tables(), random);
    }
    const PageSurvey survey = survey_pages(region.const_tables(), kSegments * kSegment, kSegment);
    Stats stats(region.tables().counters);
    const auto policy = make_eviction_policy(EvictionPolicyName::lru);
    PageTable pages(region.tables(), kSegment, *policy, stats, &survey);
    const NamespaceTable namespaces(region.tables().namespaces, pages.slots(), &survey.namespaces);
    REQUIRE(pages.resident() == survey.keep.size() + survey.held.size());
    held += survey.held.size();
    for (const HeldPage& one : survey.held) {
      REQUIRE(one.tag == 7);
      REQUIRE(pages.state(one.page) == PageState::aborting);
    }
    kept += survey.keep.size();
    for (const PageId page : survey.keep) {
      REQUIRE(pages.state(page) == PageState::ready);
      REQUIRE(pages.find(load_key(region.tables().pages[page.value]), pages.namespace_of(page)) == page);
      if (const PageId parent = pages.parent(page)) REQUIRE(pages.state(parent) == PageState::ready);
    }
    // No engine could attach to another shape than its own, and hicache-dump would complain of it for ever.
    const auto& namespaces_left = region.tables().namespaces;
    for (std::uint32_t i = 0; i < namespaces_left.size(); ++i) {
      const NamespaceEntry& ns = namespaces_left[i];
      if (!survey.namespaces[i]) continue;
      REQUIRE((ns.page_tokens > 0 && ns.layers == 2));
      REQUIRE(ns.shard_stride - ns.shard_bytes == 96);
      if (ns.successor != kNone32) REQUIRE((ns.successor != i && survey.namespaces[ns.successor]));
    }
    // Everything can be evicted, leaves first, and every slot comes back.
    while (pages.evict_one(EvictReason::request)) {
    }
    REQUIRE(pages.resident() == survey.held.size());
    for (const HeldPage& one : survey.held) pages.finish_abort(one.page);
    REQUIRE(pages.resident() == 0);
    REQUIRE(pages.slots().used_bytes() == 0);
    REQUIRE(pages.slots().assigned_segments() == 0);
  }
  CHECK(kept > 3000);
  CHECK(held > 100);
}

}  // namespace hicache::daemon
