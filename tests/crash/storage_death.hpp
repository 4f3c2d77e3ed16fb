// A daemon with storage dies at a named point, and what must be so afterwards: the region is sound, nothing
// is served wrong, every page that storage had kept before is there, and storage goes on.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/crash/crash_rig.hpp"
#include "tests/crash/dying_daemon.hpp"
#include "tests/crash/region_surgeon.hpp"
#include "tests/support/storage_daemon.hpp"

namespace hicache::test {

constexpr std::uint32_t kOldPrompts = 3;
constexpr std::uint32_t kPages = 8;
constexpr std::uint32_t kStoredPages = kOldPrompts * kPages;  // before the death
// Of 8 KiB a page: enough to fill several segments of 256 KiB.
constexpr std::uint32_t kNewPrompts = 24;

inline NamespaceSpec stored_spec() {
  return small_spec(Attention::mha, 1);
}

struct Fetched {
  std::uint32_t pages = 0;  // that came from storage or were there
  std::uint32_t wrong = 0;
};

// Asks for a prompt with all that storage has of it, and compares what is loaded.
inline Fetched fetch(TestRank& rank, std::uint64_t sequence, const std::vector<PrefixHash>& hashes) {
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

// Backs up and fetches, many times.
inline void exercise_storage(const std::string& socket) {
  TestRank rank(socket, "engine", 0, stored_spec());
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

struct StorageDeath {
  CrashPoint point;
  std::string storage;            // the section, as JSON
  std::uint32_t may_lose = 0;     // pages that storage had kept and need not have any more
  std::function<void()> prepare;  // after the first daemon has stored and died; may be empty
  std::function<void(const std::string& socket)> exercise = exercise_storage;
  std::function<void()> look;  // right after the takeover; may be empty
};

inline bool storage_adds_up(const std::string& name) {
  const RegionSurgeon region(name);
  return region.counter(Counter::live_leases) == 0 && region.counter(Counter::pinned_pages) == 0 &&
         region.counter(Counter::storing_pages) == 0 && region.counter(Counter::prefetching_pages) == 0 &&
         region.counter(Counter::ready_pages) == region.ready_pages().size();
}

inline void die_and_come_back(const StorageDeath& death) {
  INFO(death.point.name << ": " << death.point.where);
  StorageDaemon rig(death.storage);
  TestDaemon& daemon = rig.daemon();
  {
    TestRank writer(daemon, "engine", 0, stored_spec());
    for (std::uint32_t i = 0; i < kOldPrompts; ++i)
      REQUIRE(write_prompt(writer, i + 1, prompt(i, kPages)) == kPages);
  }
  rig.sync();
  REQUIRE(rig.counter("backed_up") == kStoredPages);
  daemon.kill9();
  remove_shm_leftovers(daemon.name());
  if (death.prepare) death.prepare();
  const std::size_t descriptors = descriptor_count(::getpid());
  const std::size_t mappings = mapping_count(::getpid());
  die_at(death.point, daemon, death.exercise);
  CHECK(descriptor_count(::getpid()) == descriptors);
  CHECK(mapping_count(::getpid()) == mappings);

  daemon.start();
  INFO(daemon.log());
  CHECK(dump_findings(daemon.name()) == "");
  if (death.look) death.look();
  {
    TestRank reader(daemon, "engine", 0, stored_spec());
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
    CHECK(old_pages + death.may_lose >= kStoredPages);
    // Storage takes and gives new pages.
    CHECK(write_prompt(reader, ++sequence, prompt(900, kPages)) == kPages);
    rig.sync();
    rig.empty_pool();
    CHECK(fetch(reader, ++sequence, prompt(900, kPages)).pages == kPages);
  }
  CHECK(eventually([&] { return storage_adds_up(daemon.name()); }));
  CHECK(dump_findings(daemon.name()) == "");
  CHECK(daemon.stop() == 0);
  CHECK(shm_leftovers(daemon.name()).empty());
}

}  // namespace hicache::test
