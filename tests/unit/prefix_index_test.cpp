// The prefix index: one writer, readers without locks, and what a reader makes of a damaged chain.
#include "shm/prefix_index.hpp"

#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "tests/support/catch.hpp"

namespace hicache {

namespace {

constexpr std::uint64_t kSeed = 0x5eed;
constexpr NamespaceId kNs{3};

struct Free {
  void operator()(void* p) const { std::free(p); }
};

// Index and page table of a region in private memory.
struct Index {
  Index(std::uint32_t buckets, std::uint32_t pages) {
    RegionShape shape;
    shape.index_buckets = buckets;
    shape.pages = pages;
    const RegionPlan plan = plan_region(shape);
    memory.reset(std::aligned_alloc(4096, plan.total_bytes));
    std::memset(memory.get(), 0, plan.total_bytes);
    tables = make_tables(memory.get(), plan);
    for (IndexBucket& b : tables.index) b.head.store(kNone32);
    for (PageEntry& p : tables.pages) p.chain_next.store(kNone32);
    reader = IndexReader(make_tables(static_cast<const void*>(memory.get()), plan), kSeed);
    writer = IndexWriter(tables, kSeed);
  }

  PageEntry& page(std::uint32_t id) { return tables.pages[id]; }
  void set_state(std::uint32_t id, PageState state, std::uint32_t generation) {
    page(id).word.store(PageWord{state, 0, 0, Generation{generation}}.encode(), std::memory_order_release);
  }
  std::uint32_t generation(std::uint32_t id) {
    return PageWord::decode(page(id).word.load(std::memory_order_relaxed)).generation.value;
  }
  // Takes a free page into the index as the coordinator does; stops at `state`.
  void put(std::uint32_t id, const PrefixHash& key, NamespaceId ns = kNs,
           PageState state = PageState::ready) {
    const std::uint32_t next = generation(id) + 1;
    set_state(id, PageState::reserved, next);
    for (std::size_t i = 0; i < 4; ++i) page(id).key[i].store(key.words[i], std::memory_order_relaxed);
    page(id).namespace_id.store(ns.value, std::memory_order_relaxed);
    set_state(id, PageState::filling, next);
    writer.insert(PageId{id}, writer.bucket_of(key, ns));
    if (state == PageState::ready) set_state(id, PageState::ready, next);
  }
  bool evict(std::uint32_t id) {
    const PrefixHash key = load_key(page(id));
    const NamespaceId ns{page(id).namespace_id.load(std::memory_order_relaxed)};
    set_state(id, PageState::evicting, generation(id));
    const bool found = writer.erase(PageId{id}, writer.bucket_of(key, ns));
    set_state(id, PageState::free, generation(id));
    return found;
  }
  PageId find(const PrefixHash& key, NamespaceId ns = kNs) {
    return writer.find(key, ns, writer.bucket_of(key, ns));
  }
  ProbeResult probe(const PrefixHash& key, NamespaceId ns = kNs) {
    return reader.probe(std::span(&key, 1), ns);
  }

  std::unique_ptr<void, Free> memory;
  Tables tables;
  IndexReader reader;
  IndexWriter writer;
};

PrefixHash key(std::uint64_t n) {
  std::mt19937_64 random(n);
  PrefixHash h;
  for (auto& w : h.words) w = random();
  return h;
}

std::vector<PrefixHash> keys(std::uint64_t first, std::uint64_t count) {
  std::vector<PrefixHash> out;
  for (std::uint64_t i = 0; i < count; ++i) out.push_back(key(first + i));
  return out;
}

}  // namespace

TEST_CASE("Pages are found after insert and not after erase, wherever they lie in the chain") {
  for (std::uint32_t victim = 0; victim < 5; ++victim) {
    Index index(1, 8);  // one bucket: one chain of all pages
    for (std::uint32_t id = 0; id < 5; ++id) index.put(id, key(id));
    for (std::uint32_t id = 0; id < 5; ++id) {
      CHECK(index.find(key(id)) == PageId{id});
      CHECK(index.probe(key(id)).leading == 1);
    }
    CHECK(index.evict(victim));
    for (std::uint32_t id = 0; id < 5; ++id) {
      CHECK(index.find(key(id)).is_none() == (id == victim));
      CHECK(index.probe(key(id)).leading == (id == victim ? 0u : 1u));
      CHECK_FALSE(index.probe(key(id)).busy);
    }
    CHECK(index.page(victim).chain_next.load() == kNone32);
    index.put(victim, key(100));
    CHECK(index.find(key(100)) == PageId{victim});
    CHECK(index.find(key(victim)).is_none());
  }
}

TEST_CASE("Erasing a page that is in no chain says so and changes nothing") {
  Index index(1, 8);
  index.put(0, key(0));
  index.put(1, key(1));
  CHECK_FALSE(index.writer.erase(PageId{5}, 0));
  CHECK(index.probe(key(0)).leading == 1);
  CHECK(index.probe(key(1)).leading == 1);
}

TEST_CASE("The same hash in another namespace is another page") {
  Index index(4, 8);
  index.put(0, key(0), NamespaceId{1});
  CHECK(index.probe(key(0), NamespaceId{1}).leading == 1);
  CHECK(index.probe(key(0), NamespaceId{2}).leading == 0);
  CHECK(index.find(key(0), NamespaceId{2}).is_none());
  index.put(1, key(0), NamespaceId{2});
  CHECK(index.find(key(0), NamespaceId{1}) == PageId{0});
  CHECK(index.find(key(0), NamespaceId{2}) == PageId{1});
}

TEST_CASE("A page that is not ready is seen by the writer only") {
  Index index(4, 8);
  index.put(0, key(0), kNs, PageState::filling);
  CHECK(index.find(key(0)) == PageId{0});
  CHECK(index.probe(key(0)).leading == 0);
  index.set_state(0, PageState::ready, index.generation(0));
  CHECK(index.probe(key(0)).leading == 1);
  index.set_state(0, PageState::evicting, index.generation(0));
  CHECK(index.probe(key(0)).leading == 0);
}

TEST_CASE("A probe counts leading pages, in chains longer than its batch, and stops at the first gap") {
  Index index(16, 128);
  const auto chain = keys(0, 100);
  CHECK(index.reader.probe(chain, kNs).leading == 0);
  CHECK(index.reader.probe({}, kNs).leading == 0);
  for (std::uint32_t id = 0; id < 100; ++id) index.put(id, chain[id]);
  CHECK(index.reader.probe(chain, kNs).leading == 100);
  for (const std::uint32_t gap : {99u, 64u, 33u, 32u, 31u, 1u, 0u}) {
    REQUIRE(index.evict(gap));
    CHECK(index.reader.probe(chain, kNs).leading == gap);
    CHECK_FALSE(index.reader.probe(chain, kNs).busy);
  }
}

TEST_CASE("Every change grows the bucket's version by two and wraps") {
  Index index(1, 8);
  A64& head = index.tables.index[0].head;
  head.store((0xfffffffeull << 32) | kNone32);
  index.put(0, key(0));
  CHECK(head.load() >> 32 == 0);
  CHECK(index.probe(key(0)).leading == 1);
  index.evict(0);
  CHECK(head.load() >> 32 == 2);
}

TEST_CASE("A bucket that stays in change gives up as busy") {
  Index index(1, 8);
  index.put(0, key(0));
  index.tables.index[0].head.fetch_or(1ull << 32);
  const ProbeResult result = index.probe(key(0));
  CHECK(result.leading == 0);
  CHECK(result.busy);
}

TEST_CASE("A cycle in a chain does not hang a reader") {
  Index index(1, 8);
  for (std::uint32_t id = 0; id < 3; ++id) index.put(id, key(id));
  // The chain runs 2 -> 1 -> 0.
  std::uint32_t back = 0;
  SECTION("of one") {
    back = 0;
  }
  SECTION("of two") {
    back = 1;
  }
  SECTION("of three") {
    back = 2;
  }
  index.page(0).chain_next.store(back);
  CHECK(index.probe(key(99)).leading == 0);
  CHECK(index.probe(key(0)).leading == 1);
}

TEST_CASE("Page numbers outside the table are not followed") {
  Index index(1, 8);
  index.put(0, key(0));
  SECTION("in a link") {
    index.page(0).chain_next.store(8);
    CHECK(index.probe(key(0)).leading == 1);
  }
  SECTION("in a bucket") {
    index.tables.index[0].head.store(0x12345678);
  }
  CHECK(index.probe(key(1)).leading == 0);
}

TEST_CASE("The hash seed and the namespace choose the bucket") {
  const PrefixHash h = key(1);
  CHECK(index_hash(h, NamespaceId{1}, 1) != index_hash(h, NamespaceId{1}, 2));
  CHECK(index_hash(h, NamespaceId{1}, 1) != index_hash(h, NamespaceId{2}, 1));
}

TEST_CASE("Readers that probe while the writer changes chains never miss, invent or mix up a page") {
  constexpr std::uint32_t kStay = 64;
  constexpr std::uint32_t kChurn = 64;
  constexpr std::uint32_t kFlip = 8;
  constexpr int kChanges = 200'000;
  Index index(8, kStay + kChurn + kFlip);

  const auto stay = keys(0, kStay);
  const auto churn = keys(1000, 4 * kChurn);
  const auto never = keys(9000, 64);
  for (std::uint32_t id = 0; id < kStay; ++id) index.put(id, stay[id]);
  std::vector<std::uint32_t> churn_key(kChurn);
  for (std::uint32_t i = 0; i < kChurn; ++i) index.put(kStay + i, churn[churn_key[i] = i]);
  // Pages that go back and forth between two keys of one bucket; a torn read would see a mixture.
  std::vector<PrefixHash> flip_a = keys(20000, kFlip), flip_b = keys(30000, kFlip), mixed;
  for (std::uint32_t i = 0; i < kFlip; ++i) {
    flip_b[i].words[0] = flip_a[i].words[0];
    for (std::size_t cut = 1; cut < 3; ++cut) {
      PrefixHash ab = flip_a[i], ba = flip_b[i];
      for (std::size_t w = cut + 1; w < 4; ++w) {
        ab.words[w] = flip_b[i].words[w];
        ba.words[w] = flip_a[i].words[w];
      }
      mixed.push_back(ab);
      mixed.push_back(ba);
    }
    index.put(kStay + kChurn + i, flip_a[i]);
  }

  struct Tally {
    std::uint64_t found = 0, busy = 0, missed = 0, invented = 0, mixed = 0;
  };
  std::atomic<bool> done{false};
  std::vector<Tally> tallies(2);
  std::vector<std::thread> readers;
  readers.reserve(tallies.size());
  for (Tally& tally : tallies) {
    readers.emplace_back([&, reader = index.reader] {
      const auto probe = [&](const PrefixHash& h) { return reader.probe(std::span(&h, 1), kNs); };
      do {
        for (const PrefixHash& h : stay) {
          const ProbeResult r = probe(h);
          ++(r.leading == 1 ? tally.found : r.busy ? tally.busy : tally.missed);
        }
        const ProbeResult all = reader.probe(stay, kNs);
        if (all.leading != kStay && !all.busy) ++tally.missed;
        for (const PrefixHash& h : never) tally.invented += probe(h).leading;
        for (const PrefixHash& h : mixed) tally.mixed += probe(h).leading;
      } while (!done.load(std::memory_order_acquire));
    });
  }

  std::mt19937 generator(1);
  const auto random = [&] { return static_cast<std::uint32_t>(generator()); };
  for (int change = 0; change < kChanges; ++change) {
    if (change % 2 == 0) {
      const std::uint32_t i = random() % kChurn;
      REQUIRE(index.evict(kStay + i));
      churn_key[i] = i + kChurn * (random() % 4);
      index.put(kStay + i, churn[churn_key[i]]);
    } else {
      const std::uint32_t i = random() % kFlip;
      const std::uint32_t id = kStay + kChurn + i;
      const bool was_a = load_key(index.page(id)) == flip_a[i];
      REQUIRE(index.evict(id));
      index.put(id, was_a ? flip_b[i] : flip_a[i]);
    }
    if (change % 64 == 0) std::this_thread::yield();
  }
  done.store(true, std::memory_order_release);
  for (std::thread& t : readers) t.join();

  for (const Tally& t : tallies) {
    CAPTURE(t.found, t.busy);
    CHECK(t.found > 0);
    CHECK(t.missed == 0);
    CHECK(t.invented == 0);
    CHECK(t.mixed == 0);
  }
  for (std::uint32_t i = 0; i < kChurn; ++i) CHECK(index.find(churn[churn_key[i]]) == PageId{kStay + i});
}

}  // namespace hicache
