// A daemon with storage dies at each named point of its backups, prefetches and files (shm/crash_points.hpp).
// The next one finds the region sound, serves nothing wrong, has every page that storage had kept before, and
// leaves no half-made file behind.
#include <csignal>
#include <filesystem>
#include <string>
#include <vector>

#include "shm/crash_points.hpp"
#include "tests/crash/crash_rig.hpp"
#include "tests/crash/region_surgeon.hpp"
#include "tests/support/storage_daemon.hpp"

namespace hicache::test {
namespace {

struct Point {
  const char* name;
  const char* where;
};
#define HICACHE_X(name, where) {#name, where},
constexpr Point kPoints[] = {HICACHE_STORAGE_CRASH_POINTS(HICACHE_X)};
#undef HICACHE_X

constexpr std::uint32_t kOldPrompts = 3;
constexpr std::uint32_t kPages = 8;
// Of 8 KiB a page: enough to fill several segments of 256 KiB.
constexpr std::uint32_t kNewPrompts = 24;

NamespaceSpec spec() {
  return small_spec(Attention::mha, 1);
}

// Points that come only where segments must make room: there, old pages may go.
bool makes_room(const std::string& point) {
  return point == "segment_evicted" || point == "segment_begun_again" || point == "segment_hot_moved";
}

std::string storage_at(const std::string& point, const std::string& directory) {
  nlohmann::json file = {{"directories", {directory}}, {"min_free", 0}};
  if (point.starts_with("sglang_")) {
    file["format"] = "sglang";
    file["sglang"] = {
        {"model", spec().model}, {"dtype", spec().dtype}, {"page_tokens", 4}, {"layout", "page_first"}};
  } else {
    file["segment_bytes"] = "256KiB";
    if (makes_room(point)) file["capacity"] = "1MiB";
  }
  return nlohmann::json{{"backend", "file"}, {"file", file}}.dump();
}

struct Fetched {
  std::uint32_t pages = 0;  // that came from storage or were there
  std::uint32_t wrong = 0;
};

// Asks for a prompt with all that storage has of it, and compares what is loaded.
Fetched fetch(TestRank& rank, std::uint64_t sequence, const std::vector<PrefixHash>& hashes) {
  Fetched out;
  const auto count = static_cast<std::uint32_t>(hashes.size());
  const auto reserved = rank.run(rank.session().reserve(sequence, hashes));
  if (reserved.status != Status::ok)
    throw std::runtime_error("reserve: " + std::string(to_string(reserved.status)));
  const auto fetched =
      rank.run(rank.session().prefetch(reserved.lease, 0, count, PrefetchPolicy::wait_complete));
  if (fetched.status == Status::ok) out.pages = fetched.present + fetched.written;
  if (out.pages > 0 && !loads_right(rank, reserved.lease, hashes, out.pages)) ++out.wrong;
  rank.run(rank.session().release(reserved.lease));
  return out;
}

// Everything that a daemon does with storage, once.
void exercise(const std::string& socket) {
  TestRank rank(socket, "engine", 0, spec());
  std::uint64_t sequence = 0;
  for (std::uint32_t i = 0; i < kOldPrompts; ++i) fetch(rank, ++sequence, prompt(i, kPages));
  for (std::uint32_t i = 0; i < kNewPrompts; ++i) {
    write_prompt(rank, ++sequence, prompt(100 + i, kPages));
    // Storage keeps up, so that it is not spared by a full queue.
    if (!control(socket, {"storage", "sync"}, kPatienceMs)) return;
    // What is asked for again is in use, and not evicted like the rest.
    if (!control(socket, {"clear"}, kPatienceMs)) return;
    fetch(rank, ++sequence, prompt(100 + i, kPages));
  }
}

// Files of the directory that no reader of it knows.
std::vector<std::string> half_made_files(const std::string& directory) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    const std::string name = entry.path().filename();
    if (name.ends_with(".new")) names.push_back(name);
  }
  return names;
}

bool everything_adds_up(const std::string& name) {
  const RegionSurgeon region(name);
  return region.counter(Counter::live_leases) == 0 && region.counter(Counter::pinned_pages) == 0 &&
         region.counter(Counter::storing_pages) == 0 && region.counter(Counter::prefetching_pages) == 0 &&
         region.counter(Counter::ready_pages) == region.ready_pages().size();
}

}  // namespace

TEST_CASE("the daemon may die at every named point of its storage: nothing is wrong, nothing kept is lost") {
  for (const Point& point : kPoints) {
    INFO(point.name << ": " << point.where);
    const TempDir dir;
    StorageDaemon rig(storage_at(point.name, dir.file("pages")));
    TestDaemon& daemon = rig.daemon();
    {
      TestRank writer(daemon, "engine", 0, spec());
      for (std::uint32_t i = 0; i < kOldPrompts; ++i)
        REQUIRE(write_prompt(writer, i + 1, prompt(i, kPages)) == kPages);
    }
    rig.sync();
    REQUIRE(rig.counter("backed_up") == kOldPrompts * kPages);
    daemon.kill9();
    remove_shm_leftovers(daemon.name());
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

    daemon.start();
    INFO(daemon.log());
    CHECK(dump_findings(daemon.name()) == "");
    CHECK(half_made_files(dir.file("pages")).empty());
    {
      TestRank reader(daemon, "engine", 0, spec());
      std::uint64_t sequence = 0;
      std::uint32_t old_pages = 0;
      // Twice: what the region kept, and then what storage has.
      for (const bool from_storage : {false, true}) {
        if (from_storage) rig.empty_pool();
        old_pages = 0;
        for (std::uint32_t i = 0; i < kOldPrompts + kNewPrompts; ++i) {
          const bool old = i < kOldPrompts;
          const Fetched got = fetch(reader, ++sequence, prompt(old ? i : 100 + i - kOldPrompts, kPages));
          CHECK(got.wrong == 0);
          if (old) old_pages += got.pages;
        }
      }
      if (!makes_room(point.name)) CHECK(old_pages == kOldPrompts * kPages);
      // Storage takes and gives new pages.
      CHECK(write_prompt(reader, ++sequence, prompt(900, kPages)) == kPages);
      rig.sync();
      rig.empty_pool();
      CHECK(fetch(reader, ++sequence, prompt(900, kPages)).pages == kPages);
    }
    CHECK(eventually([&] { return everything_adds_up(daemon.name()); }));
    CHECK(dump_findings(daemon.name()) == "");
    CHECK(daemon.stop() == 0);
    CHECK(shm_leftovers(daemon.name()).empty());
  }
}

}  // namespace hicache::test
