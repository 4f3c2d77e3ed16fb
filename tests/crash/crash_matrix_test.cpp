// A process dies at each named point of daemon and client library (shm/crash_points.hpp). Then: nobody hangs,
// the region is sound, what was ready is there with its bytes, everything adds up, and nothing is left over.
#include <csignal>

#include "shm/crash_points.hpp"
#include "tests/crash/crash_rig.hpp"
#include "tests/crash/pair.hpp"
#include "tests/crash/region_surgeon.hpp"
#include "tests/support/catch.hpp"

using namespace hicache;
using namespace hicache::test;

namespace {

struct Point {
  const char* name;
  const char* where;
};
#define HICACHE_X(name, where) {#name, where},
constexpr Point kDaemonPoints[] = {HICACHE_DAEMON_CRASH_POINTS(HICACHE_X)};
constexpr Point kClientPoints[] = {HICACHE_CLIENT_CRASH_POINTS(HICACHE_X)};
#undef HICACHE_X
static_assert(std::size(kDaemonPoints) + std::size(kClientPoints) >= 40);

constexpr const char* kConfig = R"({
  "pool": {"bytes": "2MiB", "segment_bytes": "256KiB"}, "eviction": {"high_watermark": 0},
  "client_waiting": {"spin_us": 0, "yield_us": 0, "park_ms": 20},
  "limits": {"clients": 8, "leases": 64, "operation_deadline_ms": 5000}
})";
constexpr std::uint32_t kOldPrompts = 4;
constexpr std::uint32_t kOldPages = 3;
constexpr std::uint32_t kEvicted = 2;  // by the daemon's scenario

NamespaceSpec old_spec() {
  return small_spec(Attention::mha, 1);
}
NamespaceSpec bumped_spec() {
  auto spec = small_spec(Attention::mha, 1);
  spec.model = "bumped-model";
  return spec;
}

// A write, a load and a release of the pair's prompt by one of its ranks. Ends when the daemon or the peer
// does.
void cooperate(TestRank& rank, const std::function<bool()>& peer_gone) {
  const auto hashes = pair_prompt();
  OperationResult reserved;
  while ((reserved = rank.run(rank.session().reserve(1, hashes))).status == Status::again && !peer_gone()) {
  }
  if (reserved.status != Status::ok) return;
  const auto missing = static_cast<std::uint32_t>(hashes.size()) - reserved.hits;
  const auto pages = TestRank::pages(0, missing);
  for (std::uint32_t i = 0; i < missing; ++i) rank.fill(pages[i], hashes[reserved.hits + i]);
  const auto written = rank.run(rank.session().write(reserved.lease, reserved.hits, pages));
  if (written.status == Status::ok)
    rank.run(rank.session().load(reserved.lease, reserved.hits, pages, LayerFence{0, 1}));
  rank.run(rank.session().release(reserved.lease));
}

// Everything that a daemon does, once. Ends early, by an exception or by results, when it dies on the way.
void exercise(const std::string& socket) {
  {
    TestRank rank0(socket, kPairEngine, 0, pair_spec());
    Child peer = Child::run([&] {
      TestRank rank1(socket, kPairEngine, 1, pair_spec());
      cooperate(rank1, [&] { return rank1.session().state() != Status::ok; });
      return 0;
    });
    cooperate(rank0, [&] { return rank0.session().state() != Status::ok; });
    if (!peer.wait()) throw std::logic_error("the other rank hangs");
  }
  {
    TestRank engine(socket, "bumped", 0, bumped_spec());
    write_prompt(engine, 1, prompt(600, 2));
  }
  // Dies while its pages are being filled: the fence of its write is never raised.
  Child lonely = Child::run([&] {
    TestRank rank(socket, "lonely", 0, old_spec());
    const auto reserved = rank.run(rank.session().reserve(1, prompt(700, 2)));
    static_cast<void>(rank.session().write(reserved.lease, 0, TestRank::pages(0, 2), WriteFence{0, 1}));
    rank.run(rank.session().nop());
    return std::raise(SIGKILL);
  });
  if (!lonely.wait()) throw std::logic_error("the lonely rank hangs");
  if (!control(socket, {"evict", std::to_string(kEvicted)})) return;
  static_cast<void>(
      control(socket, {"namespace", "bump", to_hex(bumped_spec().base_digest()).substr(0, 16)}));
}

std::uint32_t read_old(TestRank& rank, std::uint64_t first_sequence) {
  std::uint32_t hits = 0;
  for (std::uint32_t i = 0; i < kOldPrompts; ++i) {
    const ReadBack read = read_back(rank, first_sequence + i, prompt(i, kOldPages));
    CHECK(read.status == Status::ok);
    CHECK(read.wrong == 0);
    hits += read.hits;
  }
  return hits;
}

// Nothing is in anybody's hands, and pages that are not free are ready.
bool everything_adds_up(const std::string& name, std::uint64_t clients) {
  const RegionSurgeon region(name);
  return region.counter(Counter::attached_clients) == clients && region.counter(Counter::live_leases) == 0 &&
         region.counter(Counter::pinned_pages) == 0 &&
         region.counter(Counter::resident_pages) == region.ready_pages().size() &&
         region.counter(Counter::ready_pages) == region.ready_pages().size();
}

}  // namespace

TEST_CASE("the daemon may die at every named point: survivors finish and the next daemon has every page") {
  for (const Point& point : kDaemonPoints) {
    INFO(point.name << ": " << point.where);
    TestDaemon daemon(kConfig);
    {
      TestRank writer(daemon, "writer", 0, old_spec());
      write_prompts(writer, kOldPrompts, kOldPages);
      daemon.kill9();
    }
    const bool fresh = std::string(point.name).starts_with("region_");
    if (fresh) remove_shm_leftovers(daemon.name());
    const std::size_t descriptors = descriptor_count(::getpid());
    const std::size_t mappings = mapping_count(::getpid());
    {
      Child dying =
          Child::spawn({program("hicached-crashing"), "--config", daemon.config_path(), "--foreground"},
                       {std::string("HICACHE_CRASH_AT=") + point.name});
      if (dying.read_line()) {
        try {
          exercise(daemon.socket_path());
        } catch (const std::runtime_error&) {
          // An attach that the daemon did not live to answer.
        }
      }
      dying.kill(SIGTERM);  // a point that was not reached must not stop the others
      const auto end = dying.wait();
      REQUIRE(end.has_value());
      CHECK(end->signal == SIGKILL);
    }
    CHECK(descriptor_count(::getpid()) == descriptors);
    CHECK(mapping_count(::getpid()) == mappings);

    daemon.start();
    INFO(daemon.log());
    CHECK(dump_findings(daemon.name()) == "");
    {
      TestRank reader(daemon, "reader", 0, old_spec());
      const std::uint32_t hits = read_old(reader, 1);
      CHECK(hits >= (fresh ? 0 : kOldPrompts * kOldPages - kEvicted));
      // The daemon works: new pages are written and read.
      CHECK(write_prompt(reader, 50, prompt(800, 4)) == 4);
      CHECK(read_back(reader, 51, prompt(800, 4)).hits == 4);
      TestRank pair0(daemon, kPairEngine, 0, pair_spec());
      Child pair1 = Child::run([&] {
        TestRank rank(daemon, kPairEngine, 1, pair_spec());
        const ReadBack read = read_back(rank, 1, pair_prompt());
        return read.status == Status::ok && read.wrong == 0 ? 0 : 1;
      });
      ReadBack read;
      while ((read = read_back(pair0, 1, pair_prompt())).status == Status::again) {
      }
      CHECK(read.wrong == 0);
      const auto peer = pair1.wait();
      CHECK((peer && peer->exited_with(0)));
    }
    CHECK(eventually([&] { return everything_adds_up(daemon.name(), 0); }));
    CHECK(dump_findings(daemon.name()) == "");
    CHECK(daemon.stop() == 0);
    CHECK(shm_leftovers(daemon.name()).empty());
  }
}

TEST_CASE("a rank may die at every named point: its peer finishes and the daemon takes everything back") {
  TestDaemon daemon(kConfig);
  TestRank other(daemon, "other", 0, old_spec());
  write_prompts(other, kOldPrompts, kOldPages);
  const std::size_t descriptors = descriptor_count(daemon.pid());
  const std::size_t mappings = mapping_count(daemon.pid());
  std::uint64_t sequence = 100;
  for (const Point& point : kClientPoints) {
    INFO(point.name << ": " << point.where);
    {
      TestRank survivor(daemon, kPairEngine, 1, pair_spec());
      Child dying = Child::spawn({program("crash_client"), daemon.socket_path()},
                                 {std::string("HICACHE_CRASH_AT=") + point.name});
      std::optional<ExitStatus> end;
      cooperate(survivor, [&] { return (end = dying.wait(0)).has_value(); });
      if (!end) end = dying.wait();
      REQUIRE(end.has_value());
      INFO(dying.error_text());
      CHECK(end->signal == SIGKILL);
      CHECK(survivor.session().state() == Status::ok);
      CHECK(read_old(other, sequence) == kOldPrompts * kOldPages);
      sequence += kOldPrompts;
    }
    CHECK(eventually([&] { return everything_adds_up(daemon.name(), 1); }));
    CHECK(dump_findings(daemon.name()) == "");
    CHECK(eventually([&] { return descriptor_count(daemon.pid()) == descriptors; }));
    CHECK(eventually([&] { return mapping_count(daemon.pid()) == mappings; }));
    REQUIRE(control(daemon.socket_path(), {"status"}).ok());
  }
}
