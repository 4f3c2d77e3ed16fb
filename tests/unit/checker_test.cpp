// hicache-dump --check: a sound region is clean, and every planted fault is found and named.
#include "tools/dump/checker.hpp"

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "shm/counters.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/region_builder.hpp"
#include "tools/dump/json_report.hpp"
#include "tools/dump/region_check.hpp"

using namespace hicache;
using namespace hicache::inspect;
using hicache::test::RegionBuilder;
using hicache::test::standard_region;

namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

CheckReport check(const RegionBuilder& region) {
  MemorySource source(region.bytes());
  return check_region(source, Snapshot::take(source));
}

std::string all_texts(const CheckReport& report) {
  std::string texts;
  for (const Finding& f : report.findings) texts += std::string(to_string(f.id.kind)) + ": " + f.text + "\n";
  return texts;
}

bool names(const CheckReport& report, std::string_view kind, std::string_view detail) {
  return std::any_of(report.findings.begin(), report.findings.end(), [&](const Finding& f) {
    return to_string(f.id.kind) == kind && f.text.find(detail) != std::string::npos;
  });
}

// Plants a fault into a sound region and expects a finding of that kind whose sentence holds `detail`.
void expect(std::string_view kind, std::string_view detail, const std::function<void(Tables&)>& plant) {
  RegionBuilder region = standard_region();
  plant(region.tables());
  const CheckReport report = check(region);
  INFO("expected " << kind << ": ..." << detail << "..., found\n" << all_texts(report));
  CHECK(names(report, kind, detail));
}

void set_word(PageEntry& page, const std::function<void(PageWord&)>& change) {
  PageWord word = PageWord::decode(page.word.load(kRelaxed));
  change(word);
  page.word.store(word.encode(), kRelaxed);
}

// The page whose chain_next leads to another page; at least one of the four chains holds two pages.
std::uint32_t linked_page(const Tables& t) {
  for (std::uint32_t i = 0; i < t.pages.size(); ++i) {
    if (t.pages[i].chain_next.load(kRelaxed) < t.pages.size()) return i;
  }
  FAIL("no chain of two pages");
  return 0;
}

std::uint32_t index_of(Counter counter) {
  return static_cast<std::uint32_t>(counter);
}

}  // namespace

TEST_CASE("A sound region has no findings") {
  const CheckReport report = check(standard_region());
  INFO(all_texts(report));
  CHECK(report.findings.empty());
  CHECK(report.exact);
  CHECK(report.gauges_compared);
}

TEST_CASE("A page of the largest TP group is complete with as many shards") {
  RegionBuilder builder;
  const std::uint32_t ns = builder.add_namespace(kMaxTpSize, 4096, "wide");
  builder.add_page(ns, kNone32, PageState::ready);
  builder.count();
  const CheckReport report = check(builder);
  INFO(all_texts(report));
  CHECK(report.findings.empty());
}

TEST_CASE("A wrong page state is found and named") {
  expect("wrong state", "page 3 has state 9",
         [](Tables& t) { set_word(t.pages[3], [](PageWord& w) { w.state = static_cast<PageState>(9); }); });
  expect("wrong state", "page 3 is ready in generation 0",
         [](Tables& t) { set_word(t.pages[3], [](PageWord& w) { w.generation = Generation{0}; }); });
  expect("wrong state", "client 2 has state 77", [](Tables& t) { t.clients[2].state.store(77, kRelaxed); });
  expect("wrong state", "group 1 has state 5", [](Tables& t) { t.groups[1].state.store(5, kRelaxed); });
  expect("wrong state", "lease 0 has state 4", [](Tables& t) { t.leases[0].state.store(4, kRelaxed); });
  expect("wrong state", "namespace 1 has state 3",
         [](Tables& t) { t.namespaces[1].state.store(3, kRelaxed); });
}

TEST_CASE("A free page that still holds something is found") {
  expect("free page in use", "page 20 is free but has a key",
         [](Tables& t) { t.pages[20].key[2].store(1, kRelaxed); });
  expect("free page in use", "page 20 is free but has parent",
         [](Tables& t) { t.pages[20].parent.store(1, kRelaxed); });
  expect("free page in use", "page 20 is free but has pins",
         [](Tables& t) { set_word(t.pages[20], [](PageWord& w) { w.pins = 1; }); });
}

TEST_CASE("A duplicate slot is found and named") {
  expect("duplicate slot", "pages 0 and 1 are in the same slot",
         [](Tables& t) { t.pages[1].pool_offset.store(t.pages[0].pool_offset.load(kRelaxed), kRelaxed); });
}

TEST_CASE("A slot out of place is found with its offset") {
  expect("slot out of place", "not a multiple of 4096",
         [](Tables& t) { t.pages[1].pool_offset.store(5, kRelaxed); });
  expect("slot out of place", "outside the pool",
         [](Tables& t) { t.pages[1].pool_offset.store(1ull << 40, kRelaxed); });
  expect("slot out of place", "in a segment that is not assigned",
         [](Tables& t) { t.pages[1].pool_offset.store(15 * 64 * kKiB, kRelaxed); });
  expect("slot out of place", "not the start of a slot",
         [](Tables& t) { t.pages[1].pool_offset.store(4096, kRelaxed); });
}

TEST_CASE("A broken segment is found") {
  expect("broken segment", "segment 0 uses 99 of 4 slots",
         [](Tables& t) { t.segments[0].used_slots.store(99); });
  expect("broken segment", "segment 0 heads a span of 4000000000",
         [](Tables& t) { t.segments[0].span_segments.store(4'000'000'000u); });
  expect("broken segment", "segment 0 has 4 slots of 65536 bytes",
         [](Tables& t) { t.segments[0].slot_bytes.store(65536); });
  expect("broken segment", "segment 9 is unused but has span head 3",
         [](Tables& t) { t.segments[9].span_head.store(3); });
}

TEST_CASE("An orphan in the index is found and named") {
  expect("orphan in the index", "page 3 is evicting",
         [](Tables& t) { set_word(t.pages[3], [](PageWord& w) { w.state = PageState::evicting; }); });
  expect("orphan in the index", "page 3 is free",
         [](Tables& t) { set_word(t.pages[3], [](PageWord& w) { w.state = PageState::free; }); });
}

TEST_CASE("A page that the index lost is found") {
  expect("page missing from the index", "no chain leads to it", [](Tables& t) {
    const std::uint32_t page = linked_page(t);
    t.pages[page].chain_next.store(kNone32, kRelaxed);
  });
}

TEST_CASE("A cycle in a chain is found and named") {
  expect("cycle in a chain", "comes back to page", [](Tables& t) {
    const std::uint32_t page = linked_page(t);
    t.pages[page].chain_next.store(page, kRelaxed);
  });
}

TEST_CASE("Links that lead astray are found") {
  expect("link out of range", "leads to page 64 of 64",
         [](Tables& t) { t.pages[linked_page(t)].chain_next.store(64, kRelaxed); });
  expect("page in two chains", "is in the chain of bucket", [](Tables& t) {
    for (IndexBucket& bucket : t.index) {
      // Version of its own, page 0 at the head of all of them.
      bucket.head.store(bucket.head.load(kRelaxed) & ~std::uint64_t{kNone32}, kRelaxed);
    }
  });
  expect("page in the wrong bucket", "its key belongs in bucket", [](Tables& t) {
    const std::uint64_t first = t.index[0].head.load(kRelaxed);
    t.index[0].head.store(t.index[1].head.load(kRelaxed), kRelaxed);
    t.index[1].head.store(first, kRelaxed);
  });
  expect("half-made index change", "bucket 2 has version",
         [](Tables& t) { t.index[2].head.fetch_xor(1ull << 32, kRelaxed); });
}

TEST_CASE("Two pages with one key are found") {
  expect("duplicate key", "with the same key", [](Tables& t) {
    const std::uint32_t page = linked_page(t);
    PageEntry& other = t.pages[t.pages[page].chain_next.load(kRelaxed)];
    other.namespace_id.store(t.pages[page].namespace_id.load(kRelaxed), kRelaxed);
    for (std::size_t i = 0; i < 4; ++i) other.key[i].store(t.pages[page].key[i].load(kRelaxed), kRelaxed);
  });
}

TEST_CASE("Wrong counts are found and named") {
  expect("wrong count", "page 0 counts 3 children, 2 pages", [](Tables& t) { t.pages[0].children.store(3); });
  expect("wrong count", "page 0 (ready) has 2 pins, leases hold 1",
         [](Tables& t) { set_word(t.pages[0], [](PageWord& w) { ++w.pins; }); });
  expect("wrong count", "segment 0 counts 3 used slots, 4 pages",
         [](Tables& t) { t.segments[0].used_slots.store(3); });
  expect("wrong count", "lease 0 counts 5 pins, its chunks hold 4",
         [](Tables& t) { t.leases[0].pins.store(5); });
  expect("wrong count", "group 0 counts 2 leases, the lease table has 1",
         [](Tables& t) { t.groups[0].leases.store(2); });
  expect("wrong count", "namespace 0 counts 3 attached clients",
         [](Tables& t) { t.namespaces[0].attached_clients.store(3); });
}

TEST_CASE("Every wrong gauge is found and named") {
  for (const Counter counter :
       {Counter::resident_pages, Counter::ready_pages, Counter::pinned_pages, Counter::live_leases,
        Counter::used_pool_bytes, Counter::assigned_segments, Counter::attached_clients}) {
    expect("wrong gauge", counter_name(counter),
           [&](Tables& t) { t.counters[index_of(counter)].fetch_add(1); });
    expect("wrong gauge", counter_name(counter),
           [&](Tables& t) { t.counters[index_of(counter)].fetch_sub(1); });
  }
  expect("wrong gauge", "namespace 1 counts 9 resident pages",
         [](Tables& t) { t.namespaces[1].resident_pages.store(9); });
  expect("wrong gauge", "last used at stamp 5", [](Tables& t) { t.pages[0].last_use.store(5); });
}

TEST_CASE("A pin of a dead client is found and named") {
  expect("pin without an owner", "lease 0 holds 4 pins for rank 2 of group 0", [](Tables& t) {
    t.clients[2].state.store(0, kRelaxed);
    t.groups[0].members_attached.store(0b1011, kRelaxed);
  });
  expect("pin without an owner", "lease 0 holds 4 pins for group 0, which is not in use",
         [](Tables& t) { t.groups[0].state.store(0, kRelaxed); });
  expect("pin without an owner", "group 0, which has no client any more", [](Tables& t) {
    for (std::uint32_t slot = 0; slot < 4; ++slot) t.clients[slot].state.store(0, kRelaxed);
  });
  expect("pin without an owner", "chunk 0 with 4 pins belongs to lease 0",
         [](Tables& t) { t.leases[0].state.store(0, kRelaxed); });
}

TEST_CASE("Broken leases are found") {
  expect("broken lease", "lease 0 leads to chunk 16 of 16",
         [](Tables& t) { t.leases[0].first_chunk.store(16); });
  expect("broken lease", "is in a lease's list already", [](Tables& t) { t.pin_chunks[0].next.store(0); });
  expect("broken lease", "says it belongs to lease 1", [](Tables& t) { t.leases[0].first_chunk.store(1); });
  expect("broken lease", "counts 14 pages", [](Tables& t) { t.pin_chunks[0].count.store(14); });
  expect("broken lease", "pins page 4000 of 64", [](Tables& t) { t.pin_chunks[0].pages[1].store(4000); });
  expect("broken lease", "pins page 5 of namespace 1", [](Tables& t) { t.pin_chunks[0].pages[1].store(5); });
  expect("broken lease", "lease 0 has 9 hits of 4 pages", [](Tables& t) { t.leases[0].hits.store(9); });
}

TEST_CASE("An unknown namespace is found and named") {
  expect("unknown namespace", "page 8 (ready) is in namespace 2",
         [](Tables& t) { t.namespaces[2].state.store(0, kRelaxed); });
  expect("unknown namespace", "page 3 (ready) is in namespace 1000",
         [](Tables& t) { t.pages[3].namespace_id.store(1000, kRelaxed); });
  expect("unknown namespace", "lease 1 is in namespace 3",
         [](Tables& t) { t.leases[1].namespace_id.store(3); });
  expect("unknown namespace", "client 0 is attached to namespace 3",
         [](Tables& t) { t.clients[0].namespace_id.store(3); });
  expect("unknown namespace", "group 0 is in namespace 3",
         [](Tables& t) { t.groups[0].namespace_id.store(3); });
}

TEST_CASE("A wrong size class is found and named") {
  expect("wrong size class", "page 3 has size class 1, its namespace 0 has 0",
         [](Tables& t) { t.pages[3].size_class.store(1, kRelaxed); });
  expect("wrong size class", "lies in segment 0 of size class 2",
         [](Tables& t) { t.segments[0].size_class.store(2, kRelaxed); });
  expect("wrong size class", "share size class 0",
         [](Tables& t) { t.namespaces[1].size_class.store(0, kRelaxed); });
}

TEST_CASE("A broken prefix is found") {
  expect("broken prefix", "page 2 has parent 1 of generation 99",
         [](Tables& t) { t.pages[2].parent_generation.store(99); });
  expect("broken prefix", "page 2 has parent 64", [](Tables& t) { t.pages[2].parent.store(64); });
  expect("broken prefix", "page 2 is page 2 of its prefix but has no parent",
         [](Tables& t) { t.pages[2].parent.store(kNone32); });
  expect("broken prefix", "page 2 is page 7 of its prefix", [](Tables& t) { t.pages[2].depth.store(7); });
  expect("broken prefix", "page 2 is ready but its parent 1 is filling",
         [](Tables& t) { set_word(t.pages[1], [](PageWord& w) { w.state = PageState::filling; }); });
  expect("broken prefix", "its parent 5 in namespace 1", [](Tables& t) {
    t.pages[1].parent.store(5);
    t.pages[1].parent_generation.store(6);
  });
}

TEST_CASE("An incomplete ready page and a fill without a lease are found") {
  expect("incomplete page", "page 1 is ready with complete shards 0x7, expected 0xf",
         [](Tables& t) { t.pages[1].shards_done.store(7); });
  expect("fill without a lease", "page 4 is filling for lease 6",
         [](Tables& t) { t.pages[4].filler_lease.store(6); });
  expect("fill without a lease", "page 1 is ready but still names lease 0",
         [](Tables& t) { t.pages[1].filler_lease.store(0); });
}

TEST_CASE("Clients and groups that disagree are found") {
  expect("broken client", "client 0 belongs to group 3", [](Tables& t) { t.clients[0].group.store(3); });
  expect("broken client", "client 0 is rank 9 of group 0", [](Tables& t) { t.clients[0].tp_rank.store(9); });
  expect("broken client", "so is another client", [](Tables& t) { t.clients[1].tp_rank.store(0); });
  expect("broken client", "does not count it as attached",
         [](Tables& t) { t.groups[0].members_attached.store(0b1110); });
  expect("broken client", "client 0 has role 3", [](Tables& t) { t.clients[0].role.store(3); });
  expect("broken client", "its group 0 in namespace 1", [](Tables& t) { t.groups[0].namespace_id.store(1); });
  expect("broken group", "group 0 has 70 ranks", [](Tables& t) { t.groups[0].tp_size.store(70); });
  expect("broken group", "counts rank 4 as attached", [](Tables& t) {
    t.groups[0].tp_size.store(5);
    t.groups[0].members_attached.store(0b11111);
  });
  expect("broken group", "names client 7 as its scheduler",
         [](Tables& t) { t.groups[1].scheduler.store(7); });
}

TEST_CASE("A group that was moved to a bumped namespace keeps its old leases without a finding") {
  RegionBuilder region = standard_region();
  const std::uint32_t next = region.add_namespace(4, 4000, "wide@2");
  Tables& t = region.tables();
  for (std::size_t i = 0; i < 4; ++i)
    t.namespaces[next].base_digest[i].store(t.namespaces[0].base_digest[i].load());
  t.namespaces[0].state.store(static_cast<std::uint32_t>(NamespaceState::retired));
  t.namespaces[0].successor.store(next);
  t.groups[0].namespace_id.store(next);
  const CheckReport report = check(region);
  INFO(all_texts(report));
  CHECK(report.findings.empty());
}

TEST_CASE("Ring positions that can't be are found") {
  expect("ring position", "client 1: submission ring",
         [](Tables& t) { t.clients[1].sq_tail_seen.store(300); });
  expect("ring position", "client 1: completion ring",
         [](Tables& t) { t.clients[1].cq_head_seen.store(13); });
}

TEST_CASE("Broken and duplicate namespaces are found") {
  expect("duplicate namespace", "namespaces 0 and 1", [](Tables& t) {
    for (std::size_t i = 0; i < 4; ++i) t.namespaces[1].digest[i].store(t.namespaces[0].digest[i].load());
  });
  expect("broken namespace", "namespace 0 has slots of 1 bytes",
         [](Tables& t) { t.namespaces[0].slot_bytes.store(1); });
  expect("broken namespace", "namespace 0 has shard stride 4097",
         [](Tables& t) { t.namespaces[0].shard_stride.store(4097); });
  expect("broken namespace", "namespace 0 has 0 tokens",
         [](Tables& t) { t.namespaces[0].page_tokens.store(0); });
}

TEST_CASE("A damaged header is found and named") {
  expect("damaged header", "checksum", [](Tables& t) { t.header->pool_bytes.fetch_add(1); });
  expect("damaged header", "wrong magic", [](Tables& t) { t.header->magic.store(42); });
  expect("damaged header", "state 9", [](Tables& t) { t.header->state.store(9); });
  RegionBuilder region = standard_region();
  region.tables().header->sections[6].offset.store(12288 + 1);
  region.seal_header();
  CHECK(names(check(region), "damaged header", "section pages"));
}

TEST_CASE("A damaged header still shows what its tables hold") {
  RegionBuilder region = standard_region();
  region.tables().header->pool_bytes.fetch_add(1);
  MemorySource source(region.bytes());
  const Snapshot snapshot = Snapshot::take(source);
  CHECK(snapshot.verdict().condition == Condition::damaged);
  ReportOptions options;
  options.pages = options.ranks = options.operations = true;
  const auto doc = to_json(snapshot, "test", options, nullptr);
  CHECK(doc["page_list"].size() == 9);
  CHECK(doc["clients"].size() == 7);
  CHECK(doc["operations"]["records"].size() == 16);
}

TEST_CASE("The report shows one copy of a page of one shard and four of a page of four") {
  const RegionBuilder region = standard_region();
  MemorySource source(region.bytes());
  const auto doc = to_json(Snapshot::take(source), "test", {}, nullptr);
  CHECK(doc["verdict"]["condition"] == "dead");
  CHECK(doc["namespaces"][0]["pages"] == 5);
  CHECK(doc["namespaces"][0]["pool_bytes"] == 5 * 4 * 4096);
  CHECK(doc["namespaces"][1]["pages"] == 3);
  CHECK(doc["namespaces"][1]["pool_bytes"] == 3 * 8192);
  CHECK(doc["pages"]["states"]["ready"] == 7);
  CHECK(doc["index"]["pages"] == 8);
}

TEST_CASE("The flight recorder is shown in order without records that are being written") {
  RegionBuilder region = standard_region();
  region.tables().flight[20 % 16].sequence.store(0);   // being written
  region.tables().flight[19 % 16].sequence.store(12);  // belongs elsewhere
  MemorySource source(region.bytes());
  ReportOptions options;
  options.operations = true;
  const auto doc = to_json(Snapshot::take(source), "test", options, nullptr);
  const auto& records = doc["operations"]["records"];
  REQUIRE(records.size() == 14);
  CHECK(doc["operations"]["skipped"] == 2);
  for (std::size_t i = 0; i < records.size(); ++i) CHECK(records[i]["sequence"] == 5 + i);
}

namespace {

// A region that changes between reads, as a daemon's does.
class ChangingSource final : public RegionSource {
 public:
  ChangingSource(RegionBuilder& region, std::function<void(Tables&, int)> change)
      : region_(region), change_(std::move(change)) {}
  [[nodiscard]] std::uint64_t size() const override { return region_.bytes().size(); }
  std::size_t read(std::uint64_t offset, std::span<std::uint8_t> out) override {
    // Two reads of the header a snapshot: the change comes before the first.
    if (offset == 0 && header_reads_++ % 2 == 0) change_(region_.tables(), header_reads_ / 2);
    if (busy && offset != 0) region_.tables().header->commit_sequence.fetch_add(2);
    MemorySource now(std::as_const(region_).bytes());
    return now.read(offset, out);
  }
  [[nodiscard]] bool may_change() const override { return true; }
  bool busy = false;

 private:
  RegionBuilder& region_;
  std::function<void(Tables&, int)> change_;
  int header_reads_ = 0;
};

CheckReport check_live(ChangingSource& source) {
  CheckPolicy policy;
  policy.pause = [](std::uint32_t) {};
  const Snapshot first = Snapshot::take(source);
  CHECK(first.verdict().condition == Condition::alive);
  return check_region(source, first, policy);
}

}  // namespace

TEST_CASE("A live region is clean after one quiet look") {
  RegionBuilder region = standard_region();
  region.adopt();
  ChangingSource source(region, [](Tables&, int) {});
  const CheckReport report = check_live(source);
  INFO(all_texts(report));
  CHECK(report.findings.empty());
  CHECK(report.snapshots == 1);
  CHECK(report.gauges_compared);
}

TEST_CASE("A finding in a live region counts only when it survives three more looks") {
  RegionBuilder region = standard_region();
  region.adopt();
  ChangingSource passing(region, [](Tables& t, int round) { t.pages[2].depth.store(round < 3 ? 7 : 2); });
  CHECK(check_live(passing).findings.empty());

  ChangingSource lasting(region, [](Tables& t, int) { t.pages[2].depth.store(7); });
  const CheckReport report = check_live(lasting);
  CHECK(names(report, "broken prefix", "page 2 is page 7"));
  CHECK(report.snapshots == 4);
}

TEST_CASE("A finding does not survive a change of the generation") {
  RegionBuilder region = standard_region();
  region.adopt();
  ChangingSource source(region, [](Tables& t, int round) {
    t.pages[3].shards_done.store(1);
    set_word(t.pages[3],
             [&](PageWord& w) { w.generation = Generation{static_cast<std::uint32_t>(100 + round)}; });
  });
  CHECK(check_live(source).findings.empty());
}

TEST_CASE("a pool on several NUMA nodes shows what of it lies where; on one node nothing is said of nodes") {
  RegionBuilder region = standard_region();
  const auto pool_of = [&] {
    MemorySource source(region.bytes());
    return to_json(Snapshot::take(source), "test", {}, nullptr)["pool"];
  };
  CHECK_FALSE(pool_of().contains("numa_nodes"));
  const auto segments = region.tables().segments;
  std::uint64_t assigned = 0;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    segments[i].numa_node.store(i == 0 ? 3 : kNone32, kRelaxed);
    if (i > 0) assigned += segments[i].size_class.load(kRelaxed) == kNone32 ? 0 : 1;
  }
  const auto nodes = pool_of()["numa_nodes"];
  REQUIRE(nodes.size() == 2);
  CHECK(nodes[0]["node"] == 3);
  CHECK(nodes[0]["segments"] == 1);
  CHECK(nodes[1]["node"].is_null());
  CHECK(nodes[1]["segments"] == segments.size() - 1);
  CHECK(nodes[1]["segments_assigned"] == assigned);
}

TEST_CASE("Counts of a busy live region need many looks, and gauges are not compared in it") {
  RegionBuilder region = standard_region();
  region.adopt();
  region.tables().counters[index_of(Counter::ready_pages)].fetch_add(5);
  ChangingSource moving(region, [](Tables& t, int round) { t.pages[0].children.store(round < 9 ? 3 : 2); });
  moving.busy = true;
  const CheckReport clean = check_live(moving);
  INFO(all_texts(clean));
  CHECK(clean.findings.empty());
  CHECK_FALSE(clean.gauges_compared);
  REQUIRE(clean.notes.size() == 1);
  CHECK(clean.notes[0].find("gauges were not compared") != std::string::npos);

  ChangingSource wrong(region, [](Tables& t, int) { t.pages[0].children.store(3); });
  wrong.busy = true;
  CHECK(names(check_live(wrong), "wrong count", "page 0 counts 3 children"));
}
