// What the crash matrices share: the ranks that live while somebody dies, and what must be so afterwards.
#pragma once

#include <csignal>
#include <functional>
#include <string>
#include <vector>

#include "tests/crash/crash_rig.hpp"
#include "tests/crash/dying_daemon.hpp"
#include "tests/crash/pair.hpp"
#include "tests/crash/region_surgeon.hpp"
#include "tests/support/catch.hpp"

namespace hicache::test {

constexpr const char* kMatrixConfig = R"({
  "pool": {"bytes": "2MiB", "segment_bytes": "256KiB", "map_engines": ["pair", "taker", "idler", "scribbler"]},
  "eviction": {"high_watermark": 0},
  "client_waiting": {"spin_us": 0, "yield_us": 0, "park_ms": 20},
  "limits": {"clients": 8, "leases": 64, "operation_deadline_ms": 5000}
})";
constexpr std::uint32_t kOldPrompts = 4;
constexpr std::uint32_t kOldPages = 3;
constexpr std::uint32_t kAllOldPages = kOldPrompts * kOldPages;

inline NamespaceSpec old_spec() {
  return small_spec(Attention::mha, 1);
}

// A write, a load and a release of the pair's prompt by one of its ranks. Ends when the daemon or the peer
// does.
inline void cooperate(TestRank& rank, const std::function<bool()>& peer_gone) {
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

inline std::uint32_t read_old(TestRank& rank, std::uint64_t first_sequence) {
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
inline bool everything_adds_up(const std::string& name, std::uint64_t clients) {
  const RegionSurgeon region(name);
  return region.counter(Counter::attached_clients) == clients && region.counter(Counter::live_leases) == 0 &&
         region.counter(Counter::pinned_pages) == 0 &&
         region.counter(Counter::resident_pages) == region.ready_pages().size() &&
         region.counter(Counter::ready_pages) == region.ready_pages().size();
}

struct DaemonDeath {
  CrashPoint point;
  bool fresh = false;                             // it dies while it makes a region
  std::uint32_t may_lose = 0;                     // of the old pages
  std::function<void(const TestDaemon&)> before;  // while the first daemon lives; may be empty
  std::function<void(const std::string& socket)> exercise;
  std::function<void()> after;  // once the next daemon serves; may be empty
};

// A first daemon gets the old pages, a second one dies at the point, a third one must have what was ready.
inline void daemon_dies(const DaemonDeath& death) {
  INFO(death.point.name << ": " << death.point.where);
  TestDaemon daemon(kMatrixConfig);
  {
    TestRank writer(daemon, "writer", 0, old_spec());
    write_prompts(writer, kOldPrompts, kOldPages);
    if (death.before) death.before(daemon);
    daemon.kill9();
  }
  if (death.fresh) remove_shm_leftovers(daemon.name());
  const std::size_t descriptors = descriptor_count(::getpid());
  const std::size_t mappings = mapping_count(::getpid());
  die_at(death.point, daemon, death.exercise);
  CHECK(descriptor_count(::getpid()) == descriptors);
  CHECK(mapping_count(::getpid()) == mappings);

  daemon.start();
  INFO(daemon.log());
  CHECK(dump_findings(daemon.name()) == "");
  if (death.after) death.after();
  {
    TestRank reader(daemon, "reader", 0, old_spec());
    const std::uint32_t hits = read_old(reader, 1);
    CHECK(hits + death.may_lose >= (death.fresh ? 0 : kAllOldPages));
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

// One daemon, and at each point a rank of a pair that dies there, while its peer and another engine live.
inline void ranks_die(const std::vector<CrashPoint>& points, IoBackend io_backend) {
  TestDaemon daemon(kMatrixConfig);
  TestRank other(daemon, "other", 0, old_spec());
  write_prompts(other, kOldPrompts, kOldPages);
  const std::size_t descriptors = descriptor_count(daemon.pid());
  const std::size_t mappings = mapping_count(daemon.pid());
  std::uint64_t sequence = 100;
  for (const CrashPoint& point : points) {
    INFO(point.name << ": " << point.where);
    {
      TestRank survivor(daemon, kPairEngine, 1, pair_spec(), false, io_backend);
      Child dying = Child::spawn({program("crash_client"), daemon.socket_path(),
                                  io_backend == IoBackend::kernel ? "kernel" : "direct"},
                                 {"HICACHE_CRASH_AT=" + point.name});
      std::optional<ExitStatus> end;
      cooperate(survivor, [&] { return (end = dying.wait(0)).has_value(); });
      if (!end) end = dying.wait();
      REQUIRE(end.has_value());
      INFO(dying.error_text());
      CHECK(end->signal == SIGKILL);
      CHECK(survivor.session().state() == Status::ok);
      CHECK(read_old(other, sequence) == kAllOldPages);
      sequence += kOldPrompts;
    }
    CHECK(eventually([&] { return everything_adds_up(daemon.name(), 1); }));
    CHECK(dump_findings(daemon.name()) == "");
    CHECK(eventually([&] { return descriptor_count(daemon.pid()) == descriptors; }));
    CHECK(eventually([&] { return mapping_count(daemon.pid()) == mappings; }));
    REQUIRE(control(daemon.socket_path(), {"status"}).ok());
  }
}

}  // namespace hicache::test
