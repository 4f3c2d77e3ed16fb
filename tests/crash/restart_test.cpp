// A daemon that starts on the region of a dead one: what it keeps, what it drops, and what it refuses.
#include <algorithm>
#include <csignal>
#include <functional>
#include <random>
#include <set>

#include "shm/page_seal.hpp"
#include "tests/crash/crash_rig.hpp"
#include "tests/crash/region_surgeon.hpp"
#include "tests/support/catch.hpp"

using namespace hicache;
using namespace hicache::test;

namespace {

constexpr std::uint32_t kPrompts = 20;
constexpr std::uint32_t kPages = 8;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::uint32_t read_all_back(TestDaemon& daemon, const std::vector<std::vector<PrefixHash>>& prompts,
                            const std::string& engine = "reader") {
  TestRank rank(daemon, engine, 0, small_spec(Attention::mha, 1));
  std::uint32_t hits = 0;
  std::uint64_t sequence = 0;
  for (const auto& hashes : prompts) {
    const ReadBack read = read_back(rank, ++sequence, hashes);
    CHECK(read.status == Status::ok);
    CHECK(read.wrong == 0);
    hits += read.hits;
  }
  return hits;
}

}  // namespace

TEST_CASE("after SIGKILL the next daemon serves every ready page with its content") {
  TestDaemon daemon;
  std::vector<std::vector<PrefixHash>> prompts;
  {
    TestRank rank(daemon, "writer", 0, small_spec(Attention::mha, 1));
    prompts = write_prompts(rank, kPrompts, kPages);
    daemon.kill9();
  }
  daemon.start();
  INFO(daemon.log());
  CHECK(contains(daemon.log(), "160 of 160 ready pages kept"));
  CHECK(dump_findings(daemon.name()) == "");
  CHECK(read_all_back(daemon, prompts) == kPrompts * kPages);
  {
    const RegionSurgeon region(daemon.name());
    CHECK(region.counter(Counter::takeovers) == 1);
    CHECK(region.counter(Counter::pages_kept) == kPrompts * kPages);
    CHECK(region.counter(Counter::written) == region.counter(Counter::ready_pages));
    CHECK(region.counter(Counter::pinned_pages) == 0);
  }
  // The rebuilt lists work: the pool fills up, evicts and stays sound.
  TestRank rank(daemon, "again", 0, small_spec(Attention::mha, 1));
  for (std::uint32_t i = 0; i < 200; ++i) write_prompt(rank, i + 1, prompt(1000 + i, 30));
  CHECK(dump_findings(daemon.name()) == "");
  CHECK(daemon.stop() == 0);
  CHECK(shm_leftovers(daemon.name()).empty());
}

TEST_CASE("pages of several shards and of several namespaces survive a kill") {
  TestDaemon daemon;
  const auto spec = small_spec(Attention::mha, 2);
  auto other = small_spec(Attention::mla, 1);
  other.layers = 7;
  std::vector<std::vector<PrefixHash>> small;
  const auto hashes = prompt(77, 6);
  {
    TestRank mla(daemon, "mla", 0, other);
    small = write_prompts(mla, 5, 4);
    TestRank rank0(daemon, "mha", 0, spec);
    TestRank rank1(daemon, "mha", 1, spec);
    const auto r0 = rank0.run(rank0.session().reserve(1, hashes));
    const auto r1 = rank1.run(rank1.session().reserve(1, hashes));
    REQUIRE(r0.status == Status::ok);
    const auto pages = TestRank::pages(0, 6);
    for (std::uint32_t i = 0; i < 6; ++i) {
      rank0.fill(pages[i], hashes[i]);
      rank1.fill(pages[i], hashes[i]);
    }
    auto t0 = rank0.session().write(r0.lease, 0, pages);
    auto t1 = rank1.session().write(r1.lease, 0, pages);
    CHECK(rank0.run(std::move(t0)).written == 6);
    CHECK(rank1.run(std::move(t1)).status == Status::ok);
    daemon.kill9();
  }
  daemon.start();
  CHECK(dump_findings(daemon.name()) == "");
  TestRank rank0(daemon, "mha", 0, spec);
  TestRank rank1(daemon, "mha", 1, spec);
  for (TestRank* rank : {&rank0, &rank1}) {
    const auto r = rank->run(rank->session().reserve(1, hashes));
    REQUIRE(r.hits == 6);
    const auto pages = TestRank::pages(8, 6);
    CHECK(rank->run(rank->session().load(r.lease, 0, pages)).status == Status::ok);
    for (std::uint32_t i = 0; i < 6; ++i) CHECK(rank->holds(pages[i], hashes[i]));
  }
  TestRank mla(daemon, "mla", 0, other);
  for (std::uint32_t i = 0; i < small.size(); ++i) {
    const ReadBack read = read_back(mla, i + 1, small[i]);
    CHECK(read.hits == 4);
    CHECK(read.wrong == 0);
  }
}

TEST_CASE("with region.keep_on_exit an orderly restart keeps the pages, and --fresh drops them") {
  TestDaemon daemon(R"({"region": {"keep_on_exit": true}})");
  std::vector<std::vector<PrefixHash>> prompts;
  {
    TestRank rank(daemon, "writer", 0, small_spec(Attention::mha, 1));
    prompts = write_prompts(rank, 3, kPages);
  }
  REQUIRE(daemon.stop() == 0);
  daemon.start();
  CHECK(read_all_back(daemon, prompts) == 3 * kPages);
  REQUIRE(daemon.stop() == 0);
  Child fresh =
      Child::spawn({program("hicached"), "--config", daemon.config_path(), "--foreground", "--fresh"});
  REQUIRE(fresh.read_line().has_value());
  CHECK(contains(fresh.error_text(), "starting fresh, as asked"));
  CHECK(read_all_back(daemon, prompts) == 0);
  fresh.kill(SIGTERM);
  CHECK(fresh.wait().has_value());
}

TEST_CASE("entries damaged while nobody served are dropped, and what remains is right") {
  TestDaemon daemon;
  std::vector<std::vector<PrefixHash>> prompts;
  {
    TestRank rank(daemon, "writer", 0, small_spec(Attention::mha, 1));
    prompts = write_prompts(rank, kPrompts, kPages);
    daemon.kill9();
  }
  std::set<std::vector<std::uint64_t>> damaged;
  {
    const RegionSurgeon region(daemon.name());
    const auto ready = region.ready_pages();
    REQUIRE(ready.size() == kPrompts * kPages);
    const std::vector<std::function<void(PageEntry&)>> wounds = {
        [](PageEntry& p) { p.key[2] ^= 1; },
        [](PageEntry& p) { p.pool_offset = p.pool_offset + 4096; },
        [](PageEntry& p) { p.pool_offset = ~0ull; },
        [](PageEntry& p) { p.parent = 4095; },
        [](PageEntry& p) { p.parent = kNone32; },
        [](PageEntry& p) { p.depth = p.depth + 1; },
        [](PageEntry& p) { p.namespace_id = 63; },
        [](PageEntry& p) { p.namespace_id = 0xfffffffe; },
        [](PageEntry& p) { p.shards_done = 0; },
        [](PageEntry& p) { p.seal = 0; },
        [](PageEntry& p) { p.word ^= 1ull << 40; },
        [](PageEntry& p) { p.word ^= 0x80; },
        [](PageEntry& p) { p.parent_generation = p.parent_generation + 1; },
    };
    for (std::size_t i = 0; i < wounds.size(); ++i) {
      PageEntry& page = region.tables().pages[ready[i * 11 + 3]];
      damaged.insert({page.key[0], page.key[1], page.key[2], page.key[3]});
      wounds[i](page);
    }
    // Everything that can be derived may be garbage: it is built anew.
    for (IndexBucket& bucket : region.tables().index) bucket.head = 0x1234567;
    for (SegmentEntry& segment : region.tables().segments) segment.size_class = 99;
    for (LeaseEntry& lease : region.tables().leases) lease.state = 7;
    for (ClientEntry& client : region.tables().clients) client.state = 9;
    for (PinChunk& chunk : region.tables().pin_chunks) chunk.count = 1000;
  }
  daemon.start();
  INFO(daemon.log());
  CHECK(dump_findings(daemon.name()) == "");
  TestRank rank(daemon, "reader", 0, small_spec(Attention::mha, 1));
  std::uint64_t sequence = 0;
  for (const auto& hashes : prompts) {
    std::uint32_t sound = 0;
    while (sound < hashes.size() &&
           damaged.count({hashes[sound].words.begin(), hashes[sound].words.end()}) == 0) {
      ++sound;
    }
    const ReadBack read = read_back(rank, ++sequence, hashes);
    CHECK(read.hits == sound);
    CHECK(read.wrong == 0);
  }
  CHECK(contains(daemon.log(), "not kept: page"));
}

TEST_CASE("two pages that claim the same bytes or the same key are both dropped") {
  TestDaemon daemon;
  std::vector<std::vector<PrefixHash>> prompts;
  {
    TestRank rank(daemon, "writer", 0, small_spec(Attention::mha, 1));
    prompts = write_prompts(rank, 10, 1);
    daemon.kill9();
  }
  {
    const RegionSurgeon region(daemon.name());
    const auto ready = region.ready_pages();
    auto& pages = region.tables().pages;
    // Sealed again, as a bug in a daemon would leave them.
    pages[ready[0]].pool_offset = pages[ready[1]].pool_offset.load();
    pages[ready[0]].seal = page_seal(pages[ready[0]]);
    for (std::size_t w = 0; w < 4; ++w) pages[ready[2]].key[w] = pages[ready[3]].key[w].load();
    pages[ready[2]].seal = page_seal(pages[ready[2]]);
  }
  daemon.start();
  CHECK(dump_findings(daemon.name()) == "");
  CHECK(read_all_back(daemon, prompts) == 6);
}

TEST_CASE("a daemon killed at any moment of a write load leaves a region whose pages are right") {
  TestDaemon daemon(R"({"pool": {"bytes": "4MiB"}})");
  std::mt19937 random(7);
  for (int round = 0; round < 8; ++round) {
    Child writer = Child::run([&] {
      TestRank rank(daemon, "writer", 0, small_spec(Attention::mha, 1));
      for (std::uint64_t n = 1;; ++n) {
        const auto hashes = prompt(static_cast<std::uint32_t>(n % 300), 8);
        const auto reserved = rank.run(rank.session().reserve(n, hashes));
        if (reserved.status != Status::ok) return 0;
        const auto missing = static_cast<std::uint32_t>(hashes.size()) - reserved.hits;
        const auto pages = TestRank::pages(0, missing);
        for (std::uint32_t i = 0; i < missing; ++i) rank.fill(pages[i], hashes[reserved.hits + i]);
        if (missing > 0) rank.run(rank.session().write(reserved.lease, reserved.hits, pages));
        rank.run(rank.session().release(reserved.lease));
        if (n == 1) std::printf("written\n"), std::fflush(stdout);
      }
    });
    REQUIRE(writer.read_line() == "written");  // a page for certain, however slow the machine
    const timespec nap{0, static_cast<long>(20'000'000 + random() % 60'000'000)};
    ::nanosleep(&nap, nullptr);
    daemon.kill9();
    CHECK(writer.wait().has_value());  // nobody hangs
    daemon.start();
    CHECK(dump_findings(daemon.name()) == "");
    TestRank rank(daemon, "reader", 0, small_spec(Attention::mha, 1));
    std::uint32_t hits = 0;
    for (std::uint32_t i = 0; i < 300; ++i) {
      const ReadBack read = read_back(rank, i + 1, prompt(i, 8));
      CHECK(read.wrong == 0);
      hits += read.hits;
    }
    CHECK(hits > 0);
  }
}

TEST_CASE("a takeover that died half-way is taken over like any other region") {
  TestDaemon daemon;
  std::vector<std::vector<PrefixHash>> prompts;
  {
    TestRank rank(daemon, "writer", 0, small_spec(Attention::mha, 1));
    prompts = write_prompts(rank, 3, kPages);
    daemon.kill9();
  }
  {
    const RegionSurgeon region(daemon.name());
    region.tables().header->state = static_cast<std::uint32_t>(RegionState::recovering);
    region.tables().header->instance_epoch = 12345;  // the checksum no longer fits
    region.tables().header->commit_sequence = 77;
  }
  daemon.start();
  CHECK(dump_findings(daemon.name()) == "");
  CHECK(read_all_back(daemon, prompts) == 3 * kPages);
}

TEST_CASE("a region that does not fit is replaced, and the log names every difference") {
  TestDaemon daemon;
  std::vector<std::vector<PrefixHash>> prompts;
  {
    TestRank rank(daemon, "writer", 0, small_spec(Attention::mha, 1));
    prompts = write_prompts(rank, 3, kPages);
    daemon.kill9();
  }
  SECTION("another configuration") {
    daemon.write_config(R"({"pool": {"bytes": "32MiB"}, "limits": {"leases": 128}})");
    daemon.start();
    CHECK(contains(daemon.log(), "pool bytes: found 67108864, this configuration needs 33554432"));
    CHECK(contains(daemon.log(), "entries of leases: found 4096, this configuration needs 128"));
  }
  SECTION("another layout") {
    {
      const RegionSurgeon region(daemon.name());
      region.tables().header->layout_major = kLayoutMajor + 1;
    }
    daemon.start();
    CHECK(contains(daemon.log(), "it has layout 2.0 with fingerprint"));
    CHECK(contains(daemon.log(), "can't be read by this version"));
  }
  SECTION("a damaged header") {
    {
      const RegionSurgeon region(daemon.name());
      region.tables().header->hash_seed = 1;
    }
    daemon.start();
    CHECK(contains(daemon.log(), "its header is damaged"));
  }
  SECTION("a pool with a hole") {
    auto pool = open_named(pool_object_name(daemon.name(), 0), Mapping::Access::read_write);
    REQUIRE(pool.ok());
    REQUIRE(::ftruncate(pool->get(), 4096) == 0);
    REQUIRE(::ftruncate(pool->get(), 64 << 20) == 0);
    daemon.start();
    CHECK(contains(daemon.log(), "has holes"));
  }
  SECTION("keys that may change from start to start do not matter") {
    daemon.write_config(R"({"transfer": {"threads": 3}, "log": {"level": "debug"}})");
    daemon.start();
    CHECK(read_all_back(daemon, prompts) == 3 * kPages);
    return;
  }
  CHECK(contains(daemon.log(), "starting fresh"));
  CHECK(dump_findings(daemon.name()) == "");
  CHECK(read_all_back(daemon, prompts) == 0);
}

TEST_CASE("a daemon that cannot start leaves the pages for the next one") {
  TestDaemon daemon;
  std::vector<std::vector<PrefixHash>> prompts;
  {
    TestRank rank(daemon, "writer", 0, small_spec(Attention::mha, 1));
    prompts = write_prompts(rank, 3, kPages);
    daemon.kill9();
  }
  const std::string socket = daemon.socket_path();
  daemon.write_config(R"({"socket": {"path": "/nonexistent/directory/s.sock"}})");
  CHECK_THROWS(daemon.start());
  daemon.write_config(R"({"socket": {"path": ")" + socket + R"("}})");
  daemon.start();
  CHECK(read_all_back(daemon, prompts) == 3 * kPages);
}

TEST_CASE("a bump of the weights epoch survives a kill: old pages stay unreachable") {
  TestDaemon daemon;
  std::vector<std::vector<PrefixHash>> prompts;
  const auto spec = small_spec(Attention::mha, 1);
  {
    TestRank rank(daemon, "writer", 0, spec);
    prompts = write_prompts(rank, 3, kPages);
    const std::string digits = to_hex(spec.base_digest()).substr(0, 16);
    REQUIRE(control(daemon.socket_path(), {"namespace", "bump", digits}).ok());
    write_prompt(rank, 50, prompts[0]);  // made with the new weights
    daemon.kill9();
  }
  daemon.start();
  CHECK(dump_findings(daemon.name()) == "");
  TestRank rank(daemon, "reader", 0, spec);
  CHECK(read_back(rank, 1, prompts[0]).hits == kPages);
  CHECK(read_back(rank, 2, prompts[1]).hits == 0);
  CHECK(read_back(rank, 3, prompts[2]).hits == 0);
}
