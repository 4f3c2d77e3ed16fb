// What becomes of a page that no storage holds when its room is needed at once.
#include "tests/support/storage_group.hpp"

namespace hicache::test {
namespace {

// A pool of eight pages that evicts only when it needs a place.
constexpr const char* kSmallPool =
    R"({"pool": {"max_pages": 8}, "eviction": {"high_watermark": 0, "low_watermark": 0}})";

}  // namespace

TEST_CASE("dirty_eviction drop: a page that is needed at once goes, stored or not") {
  StorageDaemon rig(R"({"backup_policy": "write_back"})", kSmallPool);
  TestRank rank(rig.daemon(), "engine", 0, spec_with(4));
  for (std::uint32_t i = 0; i < 4; ++i) CHECK(write_prompt(rank, i + 1, prompt(1 + i, 4)) == 4);
  CHECK(rig.counter("evicted_dirty") == 8);
  CHECK(rig.counter("storing_refusals") == 0);
  rig.sync();
  CHECK(rig.counter("backed_up") == 0);
}

TEST_CASE("dirty_eviction write_back: nothing is lost, and who needs the room does without it meanwhile") {
  const std::string policy = GENERATE("write_back", "write_through_selective", "write_through");
  StorageDaemon rig(
      R"({"backup_policy": ")" + policy + R"(", "backup_uses": 1000, "dirty_eviction": "write_back"})",
      kSmallPool);
  TestRank rank(rig.daemon(), "engine", 0, spec_with(4));
  std::uint64_t sequence = 0;
  std::vector<std::vector<PrefixHash>> prompts;
  for (std::uint32_t i = 0; i < 4; ++i) {
    prompts.push_back(prompt(10 + i, 4));
    // Each try gets the room of what storage has by then.
    while (rank.session().probe(prompts.back()).leading < 4) {
      write_prompt(rank, ++sequence, prompts.back());
      rig.sync();
    }
  }
  CHECK(rig.counter("evicted") >= 8);
  CHECK(rig.counter("evicted_dirty") == 0);
  if (policy != "write_through") CHECK(rig.counter("storing_refusals") > 0);
  // What had to go comes back.
  for (const std::size_t i : {0u, 1u}) {
    std::uint32_t there = 0;
    while (there < 4) {
      const LeaseId lease = reserve(rank, ++sequence, prompts[i]).lease;
      const auto fetched = rank.run(rank.session().prefetch(lease, 0, 4, kComplete));
      there = fetched.written + fetched.present;
      if (there > 0) CHECK(loads_right(rank, lease, prompts[i], there));
      rank.run(rank.session().release(lease));
      rig.sync();
    }
  }
  CHECK(rig.counter("evicted_dirty") == 0);
  rig.require_clean();
}

TEST_CASE("dirty_eviction write_back: storage that is slow or gone keeps a bounded part of the pool") {
  const StallFile stall;
  StorageDaemon rig(R"({"backup_policy": "write_back", "dirty_eviction": "write_back", "write_batches": 1,
                     "backup_queue_pages": 2, "batch_deadline_ms": 600000,
                     "memory": {"stall_while": ")" +
                        stall.path() + R"("}})",
                    kSmallPool);
  TestRank rank(rig.daemon(), "engine", 0, spec_with(4));
  stall.begin();
  // At most two pages at the backend and two that wait for it: the others are dropped for whoever needs room.
  for (std::uint32_t i = 0; i < 30; ++i) CHECK(write_prompt(rank, i + 1, prompt(30 + i, 1)) == 1);
  CHECK(rig.counter("evicted_dirty") >= 18);
  CHECK(rig.counter("storing_pages") <= 4);
  CHECK(rig.counter("storing_pages") >= 1);
  stall.end();
  rig.sync();
  CHECK(rig.counter("backed_up") >= 1);
  // Without storage there is nothing to wait for.
  rig.ask({"storage", "detach"});
  for (std::uint32_t i = 0; i < 20; ++i) CHECK(write_prompt(rank, 31 + i, prompt(60 + i, 1)) == 1);
  CHECK(rig.counter("storing_pages") == 0);
  rig.require_clean();
}

}  // namespace hicache::test
