// TP groups: one decision for all ranks, publication when every shard is complete, divergence, deadlines and
// death.
#include <csignal>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/support/catch.hpp"
#include "tests/support/test_rank.hpp"

namespace hicache::test {
namespace {

std::uint64_t counter(const TestDaemon& daemon, const std::string& name) {
  auto text = control(daemon.socket_path(), {"status"});
  REQUIRE(text.ok());
  return nlohmann::json::parse(*text).at("counters").at(name).get<std::uint64_t>();
}

bool check_clean(const TestDaemon& daemon, std::string& why) {
  const auto run = run_program({program("hicache-dump"), daemon.name(), "--check"});
  why = run.out + run.err;
  return run.status.exited_with(0);
}

void require_clean(const TestDaemon& daemon) {
  std::string why;
  const bool clean = check_clean(daemon, why);
  INFO(why);
  REQUIRE(clean);
}

constexpr std::uint32_t kManyPages = 5'056;  // of several blocks (CoordinatorOptions::write_block)
constexpr const char* kLargePool = R"({"pool": {"max_pages": 8192}})";

struct Pair {
  explicit Pair(const TestDaemon& daemon, Attention attention = Attention::mha,
                const std::string& engine = "engine")
      : spec(small_spec(attention, 2)), rank0(daemon, engine, 0, spec), rank1(daemon, engine, 1, spec) {}
  NamespaceSpec spec;
  TestRank rank0;
  TestRank rank1;

  LeaseId reserve_both(std::uint64_t sequence, const std::vector<PrefixHash>& hashes, std::uint32_t hits) {
    const auto a = rank0.run(rank0.session().reserve(sequence, hashes));
    const auto b = rank1.run(rank1.session().reserve(sequence, hashes));
    REQUIRE(a.status == Status::ok);
    REQUIRE(b.status == Status::ok);
    REQUIRE(a.lease == b.lease);
    REQUIRE(a.hits == hits);
    REQUIRE(b.hits == hits);
    return a.lease;
  }
};

}  // namespace

TEST_CASE(
    "the ranks of a group get one lease and one answer for a sequence, also when it changed in between") {
  const TestDaemon daemon;
  Pair pair(daemon);
  const auto hashes = prompt(1, 4);
  const auto first = pair.rank0.run(pair.rank0.session().reserve(1, hashes));
  REQUIRE(first.hits == 0);
  // Another engine writes the pages between the two ranks' posts: the second rank still gets the group's
  // answer.
  {
    Pair other(daemon, Attention::mha, "other");
    const LeaseId lease = other.reserve_both(1, hashes, 0);
    for (TestRank* rank : {&other.rank0, &other.rank1}) {
      for (std::uint32_t i = 0; i < 4; ++i) rank->fill(DevicePage{i}, hashes[i]);
    }
    const auto t0 = other.rank0.session().write(lease, 0, TestRank::pages(0, 4));
    const auto w1 = other.rank1.run(other.rank1.session().write(lease, 0, TestRank::pages(0, 4)));
    const auto w0 = other.rank0.run(t0);
    CHECK(w0.written == 4);
    CHECK(w1.written == 4);
    other.rank0.run(other.rank0.session().release(lease));
    other.rank1.run(other.rank1.session().release(lease));
  }
  const auto second = pair.rank1.run(pair.rank1.session().reserve(1, hashes));
  CHECK(second.status == Status::ok);
  CHECK(second.lease == first.lease);
  CHECK(second.hits == 0);
  require_clean(daemon);
}

TEST_CASE("a page becomes visible only when every shard is complete") {
  const TestDaemon daemon;
  Pair pair(daemon);
  const auto hashes = prompt(2, 3);
  const LeaseId lease = pair.reserve_both(1, hashes, 0);
  for (std::uint32_t i = 0; i < 3; ++i) pair.rank0.fill(DevicePage{i}, hashes[i]);
  const auto ticket = pair.rank0.session().write(lease, 0, TestRank::pages(0, 3));
  REQUIRE(ticket.ok());
  REQUIRE(eventually([&] { return counter(daemon, "bytes_written") > 0; }));
  CHECK(pair.rank0.session().probe(hashes).leading == 0);
  for (std::uint32_t i = 0; i < 3; ++i) pair.rank1.fill(DevicePage{i}, hashes[i]);
  CHECK(pair.rank1.run(pair.rank1.session().write(lease, 0, TestRank::pages(0, 3))).written == 3);
  CHECK(pair.rank0.run(ticket).page_status == std::vector<Status>(3, Status::ok));
  CHECK(pair.rank0.session().probe(hashes).leading == 3);
  require_clean(daemon);
}

TEST_CASE("what was written is what is loaded, to other device pages, on every rank") {
  const auto attention = GENERATE(Attention::mha, Attention::mla);
  const TestDaemon daemon;
  Pair pair(daemon, attention);
  const auto hashes = prompt(3, 5);
  const LeaseId lease = pair.reserve_both(1, hashes, 0);
  for (TestRank* rank : {&pair.rank0, &pair.rank1}) {
    for (std::uint32_t i = 0; i < 5; ++i) rank->fill(DevicePage{i}, hashes[i]);
  }
  const auto t0 = pair.rank0.session().write(lease, 0, TestRank::pages(0, 5));
  REQUIRE(pair.rank1.run(pair.rank1.session().write(lease, 0, TestRank::pages(0, 5))).status == Status::ok);
  REQUIRE(pair.rank0.run(t0).written == 5);
  for (TestRank* rank : {&pair.rank0, &pair.rank1}) rank->run(rank->session().release(lease));

  const LeaseId again = pair.reserve_both(2, hashes, 5);
  for (TestRank* rank : {&pair.rank0, &pair.rank1}) {
    for (std::uint32_t i = 0; i < 5; ++i) rank->spoil(DevicePage{40 + i});
    const LayerFence fence{1, 7};
    const auto loaded = rank->run(rank->session().load(again, 0, TestRank::pages(40, 5), fence));
    CHECK(loaded.status == Status::ok);
    CHECK(loaded.bytes == 5 * pair.spec.shard_bytes());
    CHECK(rank->session().wait_layer(fence, pair.spec.layers - 1, kPatienceMs).ok());
    for (std::uint32_t i = 0; i < 5; ++i) CHECK(rank->holds(DevicePage{40 + i}, hashes[i]));
    rank->run(rank->session().release(again));
  }
  // One copy of an MLA page whatever the number of ranks.
  const std::uint64_t shards = attention == Attention::mha ? 2 : 1;
  CHECK(counter(daemon, "used_pool_bytes") == 5 * shards * kPoolAlignment);
  require_clean(daemon);
}

TEST_CASE(
    "a rank that posts different hashes gets an error, its sequence is poisoned, and nothing is published") {
  const TestDaemon daemon;
  Pair pair(daemon);
  const auto hashes = prompt(4, 3);
  const auto a = pair.rank0.run(pair.rank0.session().reserve(1, hashes));
  REQUIRE(a.status == Status::ok);
  const auto ticket = pair.rank0.session().write(a.lease, 0, TestRank::pages(0, 3));
  CHECK(pair.rank1.run(pair.rank1.session().reserve(1, prompt(5, 3))).status == Status::diverged);
  CHECK(pair.rank0.run(ticket).status == Status::poisoned);
  CHECK(pair.rank0.run(pair.rank0.session().load(a.lease, 0, TestRank::pages(0, 1))).status ==
        Status::poisoned);
  CHECK(pair.rank0.run(pair.rank0.session().release(a.lease)).status == Status::ok);
  CHECK(pair.rank0.session().probe(hashes).leading == 0);
  CHECK(counter(daemon, "divergences") == 1);
  // The group goes on with its next sequence.
  const LeaseId next = pair.reserve_both(2, hashes, 0);
  for (TestRank* rank : {&pair.rank0, &pair.rank1})
    CHECK(rank->run(rank->session().release(next)).status == Status::ok);
  REQUIRE(eventually([&] { return counter(daemon, "resident_pages") == 0; }));
  require_clean(daemon);
}

TEST_CASE("a rank that writes another range than its group is a divergence") {
  const TestDaemon daemon;
  Pair pair(daemon);
  const auto hashes = prompt(6, 4);
  const LeaseId lease = pair.reserve_both(1, hashes, 0);
  const auto ticket = pair.rank0.session().write(lease, 0, TestRank::pages(0, 4));
  REQUIRE(eventually([&] { return counter(daemon, "resident_pages") == 4; }));  // rank 0 came first
  CHECK(pair.rank1.run(pair.rank1.session().write(lease, 0, TestRank::pages(0, 3))).status ==
        Status::diverged);
  CHECK(pair.rank0.run(ticket).status == Status::poisoned);
  for (TestRank* rank : {&pair.rank0, &pair.rank1})
    CHECK(rank->run(rank->session().release(lease)).status == Status::ok);
  CHECK(pair.rank0.session().probe(hashes).leading == 0);
  require_clean(daemon);
}

TEST_CASE("a silent rank ends a group write at its deadline, and the pages are free again") {
  const TestDaemon daemon;
  Pair pair(daemon);
  const auto hashes = prompt(7, 2);
  const LeaseId lease = pair.reserve_both(1, hashes, 0);
  const auto late =
      pair.rank0.run(pair.rank0.session().write(lease, 0, TestRank::pages(0, 2), std::nullopt, 50));
  CHECK(late.status == Status::timed_out);
  CHECK(late.page_status == std::vector<Status>(2, Status::dropped));
  // The rank that comes after the end learns it at once.
  CHECK(pair.rank1.run(pair.rank1.session().write(lease, 0, TestRank::pages(0, 2))).status ==
        Status::timed_out);
  CHECK(pair.rank0.session().probe(hashes).leading == 0);
  for (TestRank* rank : {&pair.rank0, &pair.rank1}) rank->run(rank->session().release(lease));
  REQUIRE(eventually([&] { return counter(daemon, "resident_pages") == 0; }));
  require_clean(daemon);
}

TEST_CASE(
    "a write waits for its fence, and one whose fence never comes ends by its deadline with its pages "
    "returned") {
  const TestDaemon daemon;
  TestRank rank(daemon, "solo", 0, small_spec(Attention::mha, 1));
  const auto hashes = prompt(8, 2);
  const auto reserved = rank.run(rank.session().reserve(1, hashes));
  const auto held = rank.session().write(reserved.lease, 0, TestRank::pages(0, 1), WriteFence{3, 5});
  REQUIRE(held.ok());
  CHECK(rank.session().wait(*held, 100).status() ==
        Status::timed_out);  // only this wait: the operation goes on
  rank.fill(DevicePage{0}, hashes[0]);
  rank.session().raise_write_fence(3, 5);
  CHECK(rank.run(held).written == 1);
  const auto never =
      rank.run(rank.session().write(reserved.lease, 1, TestRank::pages(1, 1), WriteFence{3, 6}, 50));
  CHECK(never.status == Status::timed_out);
  if (never.pages_busy) {
    REQUIRE(eventually([&] {
      const auto event = rank.session().poll();
      return event && event->pages_returned && event->ticket == never.ticket;
    }));
  }
  CHECK(rank.session().probe(hashes).leading == 1);
  rank.run(rank.session().release(reserved.lease));
  require_clean(daemon);
}

TEST_CASE(
    "a second release by one rank, a stale lease and an invented lease are errors that change nothing") {
  const TestDaemon daemon;
  Pair pair(daemon);
  const auto hashes = prompt(9, 2);
  const LeaseId lease = pair.reserve_both(1, hashes, 0);
  CHECK(pair.rank0.run(pair.rank0.session().release(lease)).status == Status::ok);
  CHECK(pair.rank0.run(pair.rank0.session().release(lease)).status == Status::already_released);
  CHECK(pair.rank1.run(pair.rank1.session().release(lease)).status == Status::ok);
  CHECK(pair.rank1.run(pair.rank1.session().release(lease)).status == Status::stale_generation);
  CHECK(pair.rank0.run(pair.rank0.session().release(LeaseId{0x7700000001ull})).status ==
        Status::unknown_lease);
  // A sequence that has ended can't be opened again, one that is a window older neither.
  CHECK(pair.rank0.run(pair.rank0.session().reserve(1, hashes)).status == Status::stale_generation);
  const LeaseId ahead = pair.reserve_both(1 + kGroupSequenceWindow, hashes, 0);
  CHECK(pair.rank0.run(pair.rank0.session().reserve(1, hashes)).status == Status::stale_generation);
  for (TestRank* rank : {&pair.rank0, &pair.rank1}) rank->run(rank->session().release(ahead));
  CHECK(counter(daemon, "double_release") == 1);
  require_clean(daemon);
}

TEST_CASE("a write of thousands of pages, copied block by block, brings every page on every rank") {
  const TestDaemon daemon(kLargePool);
  Pair pair(daemon);
  const auto hashes = prompt(21, kManyPages);
  const auto patterns =
      prompt(22, TestRank::kDevicePages);  // device page i has what belongs to the i-th of these
  std::vector<DevicePage> device;
  for (std::uint32_t i = 0; i < kManyPages; ++i) device.push_back(DevicePage{i % TestRank::kDevicePages});
  const LeaseId lease = pair.reserve_both(1, hashes, 0);
  for (TestRank* rank : {&pair.rank0, &pair.rank1}) {
    for (std::uint32_t i = 0; i < TestRank::kDevicePages; ++i) rank->fill(DevicePage{i}, patterns[i]);
  }
  const auto posted = pair.rank0.session().write(lease, 0, device);
  const auto w1 = pair.rank1.run(pair.rank1.session().write(lease, 0, device));
  const auto w0 = pair.rank0.run(posted);
  for (const OperationResult& w : {w0, w1}) {
    CHECK(w.status == Status::ok);
    CHECK(w.written == kManyPages);
    CHECK(w.bytes == std::uint64_t{kManyPages} * pair.spec.shard_bytes());
  }
  CHECK(pair.rank0.session().probe(hashes).leading == kManyPages);
  // Where blocks begin and end, whatever their size, and everywhere else.
  std::uint32_t wrong = 0;
  for (std::uint32_t first = 0; first + TestRank::kDevicePages <= kManyPages;
       first += TestRank::kDevicePages) {
    for (TestRank* rank : {&pair.rank0, &pair.rank1}) {
      for (std::uint32_t i = 0; i < TestRank::kDevicePages; ++i) rank->spoil(DevicePage{i});
      REQUIRE(
          rank->run(rank->session().load(lease, first, TestRank::pages(0, TestRank::kDevicePages))).status ==
          Status::ok);
      for (std::uint32_t i = 0; i < TestRank::kDevicePages; ++i)
        wrong += rank->holds(DevicePage{i}, patterns[i]) ? 0 : 1;
    }
  }
  CHECK(wrong == 0);
  for (TestRank* rank : {&pair.rank0, &pair.rank1}) rank->run(rank->session().release(lease));
  require_clean(daemon);
}

TEST_CASE("a write of thousands of pages whose fence never comes ends once, and returns its pages once") {
  const TestDaemon daemon(kLargePool);
  TestRank rank(daemon, "solo", 0, small_spec(Attention::mha, 1));
  const auto hashes = prompt(23, kManyPages);
  const auto reserved = rank.run(rank.session().reserve(1, hashes));
  REQUIRE(reserved.status == Status::ok);
  const std::vector<DevicePage> device(kManyPages, DevicePage{0});
  const auto never = rank.run(rank.session().write(reserved.lease, 0, device, WriteFence{3, 1}, 50));
  CHECK(never.status == Status::timed_out);
  CHECK(never.page_status == std::vector<Status>(kManyPages, Status::dropped));
  std::uint32_t returned = never.pages_busy ? 0 : 1;
  REQUIRE(eventually([&] {
    while (const auto event = rank.session().poll()) {
      if (event->pages_returned && event->ticket == never.ticket) ++returned;
    }
    return returned > 0 && counter(daemon, "resident_pages") == 0;
  }));
  // The session goes on, and hears nothing more of it.
  rank.fill(DevicePage{0}, hashes[0]);
  rank.run(rank.session().release(reserved.lease));
  const auto again = rank.run(rank.session().reserve(2, std::span(hashes).first(1)));
  CHECK(rank.run(rank.session().write(again.lease, 0, TestRank::pages(0, 1))).written == 1);
  while (const auto event = rank.session().poll()) {
    if (event->pages_returned) ++returned;
  }
  CHECK(returned == 1);
  rank.run(rank.session().release(again.lease));
  require_clean(daemon);
}

TEST_CASE("a lease of another group is unknown") {
  const TestDaemon daemon;
  TestRank mine(daemon, "mine", 0, small_spec(Attention::mha, 1));
  TestRank theirs(daemon, "theirs", 0, small_spec(Attention::mha, 1));
  const auto reserved = mine.run(mine.session().reserve(1, prompt(10, 1)));
  CHECK(theirs.run(theirs.session().release(reserved.lease)).status == Status::unknown_lease);
  CHECK(theirs.run(theirs.session().load(reserved.lease, 0, TestRank::pages(0, 1))).status ==
        Status::unknown_lease);
  CHECK(mine.run(mine.session().release(reserved.lease)).status == Status::ok);
}

TEST_CASE("reserve pins: pages of an open lease survive pressure that evicts everything else") {
  const TestDaemon daemon(
      R"({"pool": {"max_pages": 8}, "eviction": {"high_watermark": 0, "low_watermark": 0}})");
  TestRank rank(daemon, "solo", 0, small_spec(Attention::mha, 1));
  const auto kept = prompt(11, 3);
  REQUIRE(write_prompt(rank, 1, kept) == 3);
  const auto lease = rank.run(rank.session().reserve(2, kept));
  REQUIRE(lease.hits == 3);
  for (std::uint32_t i = 0; i < 20; ++i) write_prompt(rank, 10 + i, prompt(100 + i, 4));
  for (std::uint32_t i = 0; i < 3; ++i) rank.spoil(DevicePage{20 + i});
  CHECK(rank.run(rank.session().load(lease.lease, 0, TestRank::pages(20, 3))).status == Status::ok);
  for (std::uint32_t i = 0; i < 3; ++i) CHECK(rank.holds(DevicePage{20 + i}, kept[i]));
  rank.run(rank.session().release(lease.lease));
  CHECK(counter(daemon, "evicted") > 0);
  require_clean(daemon);
}

TEST_CASE("when every page is pinned a write drops what has no room and says so per page") {
  const TestDaemon daemon(
      R"({"pool": {"max_pages": 4}, "eviction": {"high_watermark": 0, "low_watermark": 0}})");
  TestRank rank(daemon, "solo", 0, small_spec(Attention::mha, 1));
  const auto hashes = prompt(12, 6);
  const auto lease = rank.run(rank.session().reserve(1, hashes));
  const auto written = rank.run(rank.session().write(lease.lease, 0, TestRank::pages(0, 6)));
  CHECK(written.status == Status::ok);
  CHECK(written.written == 4);
  CHECK(written.dropped == 2);
  CHECK(written.page_status == std::vector<Status>{Status::ok, Status::ok, Status::ok, Status::ok,
                                                   Status::dropped, Status::dropped});
  rank.run(rank.session().release(lease.lease));
  require_clean(daemon);
}

TEST_CASE("two engines of one namespace write one prefix at once: every page is filled once") {
  const TestDaemon daemon;
  const NamespaceSpec spec = small_spec(Attention::mha, 1);
  TestRank a(daemon, "a", 0, spec);
  TestRank b(daemon, "b", 0, spec);
  const auto hashes = prompt(13, 4);
  const auto la = a.run(a.session().reserve(1, hashes));
  const auto lb = b.run(b.session().reserve(1, hashes));
  for (std::uint32_t i = 0; i < 4; ++i) {
    a.fill(DevicePage{i}, hashes[i]);
    b.fill(DevicePage{i}, hashes[i]);
  }
  // a's first two pages are held back by a fence: b finds them being filled and adds its own two behind them.
  const auto ta = a.session().write(la.lease, 0, TestRank::pages(0, 2), WriteFence{0, 1});
  REQUIRE(eventually([&] { return counter(daemon, "resident_pages") == 2; }));
  const auto tb = b.session().write(lb.lease, 0, TestRank::pages(0, 4));
  REQUIRE(eventually([&] { return counter(daemon, "skipped_filling") == 2; }));
  CHECK(b.session().probe(hashes).leading == 0);  // complete, but their parents are not ready
  a.session().raise_write_fence(0, 1);
  CHECK(a.run(ta).written == 2);
  const auto wb = b.run(tb);
  CHECK(wb.written == 2);
  CHECK(wb.filling == 2);
  CHECK(wb.page_status == std::vector<Status>{Status::busy, Status::busy, Status::ok, Status::ok});
  CHECK(a.session().probe(hashes).leading == 4);
  a.run(a.session().release(la.lease));
  b.run(b.session().release(lb.lease));
  CHECK(counter(daemon, "written") == 4);
  require_clean(daemon);
}

TEST_CASE(
    "two engines write one prefix at once and one dies: its pages are free again and the other writes them") {
  const TestDaemon daemon;
  const NamespaceSpec spec = small_spec(Attention::mha, 1);
  const auto hashes = prompt(14, 4);
  Child dying = Child::run([&] {
    TestRank rank(daemon, "dying", 0, spec);
    const auto lease = rank.run(rank.session().reserve(1, hashes));
    // A fence that nobody raises: the pages stay half-written until the process dies.
    if (!rank.session().write(lease.lease, 0, TestRank::pages(0, 2), WriteFence{0, 1})) return 1;
    std::this_thread::sleep_for(std::chrono::minutes(5));
    return 0;
  });
  REQUIRE(eventually([&] { return counter(daemon, "resident_pages") == 2; }));
  TestRank survivor(daemon, "survivor", 0, spec);
  const auto lease = survivor.run(survivor.session().reserve(1, hashes));
  const auto ticket = survivor.session().write(lease.lease, 0, TestRank::pages(0, 4));
  REQUIRE(eventually([&] { return counter(daemon, "skipped_filling") == 2; }));
  dying.kill(SIGKILL);
  const auto ended = survivor.run(ticket);
  CHECK(ended.status == Status::ok);
  CHECK(ended.written == 0);
  CHECK(ended.page_status ==
        std::vector<Status>{Status::busy, Status::busy, Status::dropped, Status::dropped});
  survivor.run(survivor.session().release(lease.lease));
  REQUIRE(eventually([&] { return counter(daemon, "resident_pages") == 0; }));
  CHECK(write_prompt(survivor, 2, hashes) == 4);
  CHECK(survivor.session().probe(hashes).leading == 4);
  CHECK(counter(daemon, "lost_clients") == 1);
  require_clean(daemon);
}

TEST_CASE("AC-74 owner death: filling pages are free, pins are gone, ready pages stay readable") {
  const TestDaemon daemon;
  const NamespaceSpec spec = small_spec(Attention::mha, 1);
  const auto ready = prompt(15, 2);
  const auto filling = prompt(16, 4);
  TestRank other(daemon, "other", 0, spec);
  REQUIRE(write_prompt(other, 1, ready) == 2);
  Child dying = Child::run([&] {
    TestRank rank(daemon, "dying", 0, spec);
    if (rank.run(rank.session().reserve(1, ready)).hits != 2) return 1;
    const auto lease = rank.run(rank.session().reserve(2, filling));
    if (!rank.session().write(lease.lease, 0, TestRank::pages(0, 4), WriteFence{0, 1})) return 1;
    std::this_thread::sleep_for(std::chrono::minutes(5));
    return 0;
  });
  REQUIRE(eventually([&] { return counter(daemon, "resident_pages") == 6; }));
  CHECK(counter(daemon, "pinned_pages") == 6);
  dying.kill(SIGKILL);
  REQUIRE(eventually([&] { return counter(daemon, "resident_pages") == 2; }));
  CHECK(counter(daemon, "pinned_pages") == 0);
  CHECK(counter(daemon, "live_leases") == 0);
  CHECK(other.session().probe(ready).leading == 2);
  CHECK(write_prompt(other, 2, filling) == 4);
  require_clean(daemon);
}

TEST_CASE("the death of a rank ends its group's operations at once and later ones with peer_lost") {
  const TestDaemon daemon;
  const NamespaceSpec spec = small_spec(Attention::mha, 2);
  const auto hashes = prompt(17, 3);
  Child dying = Child::run([&] {
    TestRank rank(daemon, "group", 1, spec);
    OperationResult reserved;
    do reserved = rank.run(rank.session().reserve(1, hashes));
    while (reserved.status == Status::again);
    std::this_thread::sleep_for(std::chrono::minutes(5));
    return 0;
  });
  TestRank survivor(daemon, "group", 0, spec);
  OperationResult reserved;
  REQUIRE(eventually([&] {
    reserved = survivor.run(survivor.session().reserve(1, hashes));
    return reserved.status != Status::again;
  }));
  REQUIRE(reserved.status == Status::ok);
  const auto ticket = survivor.session().write(reserved.lease, 0, TestRank::pages(0, 3));
  dying.kill(SIGKILL);
  CHECK(survivor.run(ticket).status == Status::peer_lost);
  CHECK(survivor.run(survivor.session().reserve(2, hashes)).status == Status::peer_lost);
  REQUIRE(eventually([&] { return counter(daemon, "resident_pages") == 0; }));
  // The engine attaches again: a new group under the same name.
  survivor.detach();
  Pair fresh(daemon, Attention::mha, "group");
  const LeaseId lease = fresh.reserve_both(1, hashes, 0);
  for (TestRank* rank : {&fresh.rank0, &fresh.rank1})
    CHECK(rank->run(rank->session().release(lease)).status == Status::ok);
  require_clean(daemon);
}

TEST_CASE("a scheduler reserves and its workers write and load with its lease") {
  const TestDaemon daemon;
  Pair workers(daemon, Attention::mha, "engine");
  AttachOptions options;
  options.socket_path = daemon.socket_path();
  options.role = Role::scheduler;
  options.engine = "engine";
  options.spec = workers.spec;
  auto scheduler = TestRank::take(Session::attach(options));
  const auto hashes = prompt(18, 2);
  const auto reserved = scheduler->wait(*scheduler->reserve(1, hashes), kPatienceMs);
  REQUIRE(reserved.ok());
  REQUIRE(reserved->status == Status::ok);
  for (TestRank* rank : {&workers.rank0, &workers.rank1}) {
    for (std::uint32_t i = 0; i < 2; ++i) rank->fill(DevicePage{i}, hashes[i]);
  }
  const auto t0 = workers.rank0.session().write(reserved->lease, 0, TestRank::pages(0, 2));
  CHECK(workers.rank1.run(workers.rank1.session().write(reserved->lease, 0, TestRank::pages(0, 2))).written ==
        2);
  CHECK(workers.rank0.run(t0).written == 2);
  CHECK(workers.rank0.run(workers.rank0.session().load(reserved->lease, 0, TestRank::pages(8, 2))).status ==
        Status::ok);
  // The lease is the scheduler's: a worker does not hold it, and a scheduler has no device pages.
  CHECK(workers.rank0.run(workers.rank0.session().release(reserved->lease)).status ==
        Status::already_released);
  CHECK(scheduler->load(reserved->lease, 0, TestRank::pages(0, 1)).status() == Status::not_permitted);
  CHECK(scheduler->wait(*scheduler->release(reserved->lease), kPatienceMs)->status == Status::ok);
  require_clean(daemon);
}

TEST_CASE("a rank's place is taken once, and a group decides nothing before it is complete") {
  const TestDaemon daemon;
  const NamespaceSpec spec = small_spec(Attention::mha, 2);
  TestRank rank0(daemon, "engine", 0, spec);
  AttachOptions options;
  options.socket_path = daemon.socket_path();
  options.engine = "engine";
  options.tp_rank = 0;
  options.spec = spec;
  const auto twice = Session::attach(options);
  CHECK(twice.status() == Status::exists);
  CHECK(rank0.run(rank0.session().reserve(1, prompt(19, 1))).status == Status::again);
}

TEST_CASE("evicting by request goes from the end of prefixes, and clear leaves only pinned pages") {
  const TestDaemon daemon;
  TestRank rank(daemon, "solo", 0, small_spec(Attention::mha, 1));
  const auto hashes = prompt(20, 6);
  write_prompt(rank, 1, hashes);
  REQUIRE(control(daemon.socket_path(), {"evict", "2"}).ok());
  CHECK(rank.session().probe(hashes).leading == 4);
  const auto lease = rank.run(rank.session().reserve(2, std::span(hashes).first(2)));
  REQUIRE(lease.hits == 2);
  REQUIRE(control(daemon.socket_path(), {"clear"}).ok());
  CHECK(rank.session().probe(hashes).leading == 2);
  rank.run(rank.session().release(lease.lease));
  REQUIRE(control(daemon.socket_path(), {"clear"}).ok());
  CHECK(rank.session().probe(hashes).leading == 0);
  CHECK_FALSE(control(daemon.socket_path(), {"evict", "many"}).ok());
  require_clean(daemon);
}

TEST_CASE("background eviction keeps the pool between its watermarks") {
  const TestDaemon daemon(
      R"({"pool": {"max_pages": 100}, "eviction": {"high_watermark": 0.8, "low_watermark": 0.5}})");
  TestRank rank(daemon, "solo", 0, small_spec(Attention::mha, 1));
  for (std::uint32_t i = 0; i < 30; ++i) write_prompt(rank, 1 + i, prompt(200 + i, 5));
  REQUIRE(eventually([&] { return counter(daemon, "resident_pages") <= 80; }));
  CHECK(counter(daemon, "evicted_watermark") > 0);
  CHECK(counter(daemon, "evicted_demand") == 0);
  require_clean(daemon);
}

TEST_CASE("a daemon that stops lets a group end the write that one of its ranks has posted") {
  TestDaemon daemon;
  Pair pair(daemon);
  const auto hashes = prompt(1, 3);
  const LeaseId lease = pair.reserve_both(1, hashes, 0);
  const auto posted = TestRank::take(pair.rank0.session().write(lease, 0, TestRank::pages(0, 3)));
  REQUIRE(eventually([&] { return counter(daemon, "resident_pages") == 3; }));
  daemon.child().kill(SIGTERM);
  std::uint64_t sequence = 1;
  REQUIRE(eventually([&] {
    return pair.rank0.run(pair.rank0.session().reserve(++sequence, hashes)).status == Status::shutting_down;
  }));
  CHECK(pair.rank1.run(pair.rank1.session().write(lease, 0, TestRank::pages(0, 3))).status == Status::ok);
  CHECK(pair.rank0.run(posted).status == Status::ok);
}

}  // namespace hicache::test
