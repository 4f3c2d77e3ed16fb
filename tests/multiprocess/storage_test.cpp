// Pages that go to storage and come back: prefetch decided once for a group, backup by policy, and what
// happens when storage fails, stalls, or is taken away.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/controller_rank.hpp"
#include "tests/support/storage_group.hpp"

namespace hicache::test {

TEST_CASE("what was written comes back from storage after it has left the pool, byte for byte") {
  const auto attention = GENERATE(Attention::mha, Attention::mla);
  StorageDaemon rig;
  Group group(rig.daemon(), spec_with(4, 2, attention));
  const auto hashes = prompt(1, 20);
  REQUIRE(group.write_all(1, hashes) == 20);
  rig.sync();
  CHECK(rig.counter("backed_up") == 20);
  rig.empty_pool();
  CHECK(rig.counter("evicted_dirty") == 0);
  const LeaseId lease = group.reserve_all(2, hashes);
  std::vector<Ticket> tickets;
  for (auto& rank : group.ranks) {
    tickets.push_back(TestRank::take(rank->session().prefetch(lease, 0, 20, kComplete)));
  }
  for (std::size_t i = 0; i < 2; ++i) {
    const auto result = group[i].run(tickets[i]);
    CHECK(result.status == Status::ok);
    CHECK(result.hits == 20);
    CHECK(result.written == 20);
    CHECK(result.present == 0);
    CHECK(loads_right(group[i], lease, hashes, 20));
  }
  CHECK(group[0].session().probe(hashes).leading == 20);
  group.release_all(lease);
  CHECK(rig.counter("prefetched") == 20);
  CHECK(rig.counter("storage_reads") == 1);
  CHECK(rig.counter("storage_read_us") > 0);
  CHECK(rig.counter("storage_writes") >= 1);
  CHECK(rig.counter("written") == 20);
  // They came from storage: they need not go there again.
  rig.sync();
  CHECK(rig.counter("backed_up") == 20);
  rig.require_clean();
}

TEST_CASE("AC-52 storage with a hole counts up to the hole") {
  StorageDaemon rig(R"({"memory": {"corrupt_get_every": 3}})");
  TestRank rank(rig.daemon(), "engine", 0, spec_with(4));
  const auto hashes = prompt(2, 4);
  rig.store(rank, 1, hashes);
  // The third page is found damaged and dropped: h0, h1 and h3 are left.
  auto lease = reserve(rank, 2, hashes).lease;
  auto result = rank.run(rank.session().prefetch(lease, 0, 4, kComplete));
  CHECK(result.hits == 4);
  CHECK(result.written == 2);
  CHECK(result.dropped == 2);
  CHECK(loads_right(rank, lease, hashes, 2));
  rank.run(rank.session().release(lease));
  CHECK(rig.counter("storage_corrupt") == 1);
  rig.empty_pool();
  lease = reserve(rank, 3, hashes).lease;
  result = rank.run(rank.session().prefetch(lease, 0, 4, kComplete));
  CHECK(result.hits == 2);
  CHECK(result.dropped >= 2);
  rank.run(rank.session().release(lease));
  rig.require_clean();
}

TEST_CASE("AC-53 room is taken for what storage has, and none below the threshold") {
  StorageDaemon rig(R"({"prefetch_threshold_tokens": 256})");
  Group group(rig.daemon(), spec_with(64, 4));
  // 1024 tokens are asked for. Storage has 768 of one prompt and 192 of the other, for the whole group: a
  // page is there when all its shards are.
  const auto long_prompt = prompt(3, 16);
  const auto short_prompt = prompt(4, 16);
  REQUIRE(group.write_all(1, {long_prompt.begin(), long_prompt.begin() + 12}) == 12);
  REQUIRE(group.write_all(2, {short_prompt.begin(), short_prompt.begin() + 3}) == 3);
  rig.sync();
  rig.empty_pool();
  LeaseId lease = group.reserve_all(3, long_prompt);
  std::vector<Ticket> tickets;
  for (auto& rank : group.ranks)
    tickets.push_back(TestRank::take(rank->session().prefetch(lease, 0, 16, kComplete)));
  for (std::size_t i = 0; i < 4; ++i) {
    const auto result = group[i].run(tickets[i]);
    CHECK(result.hits == 12);
    CHECK(result.written == 12);
    CHECK(result.dropped == 4);
  }
  CHECK(rig.counter("resident_pages") == 12);  // the surplus of 256 tokens was never taken
  group.release_all(lease);
  lease = group.reserve_all(4, short_prompt);
  for (auto& rank : group.ranks) {
    const auto result = rank->run(rank->session().prefetch(lease, 0, 16, kComplete));
    CHECK(result.hits == 3);
    CHECK(result.written == 0);
  }
  CHECK(rig.counter("prefetch_revoked") == 1);
  CHECK(rig.counter("resident_pages") == 12);
  // And less than the threshold is not even asked for.
  CHECK(group[0].run(group[0].session().release(lease)).status == Status::ok);
  const auto queried = rig.counter("storage_queried");
  const std::vector<PrefixHash> three(short_prompt.begin(), short_prompt.begin() + 3);
  lease = group.reserve_all(5, three);
  CHECK(group[1].run(group[1].session().prefetch(lease, 0, 3)).status == Status::ok);
  CHECK(rig.counter("prefetch_short") == 1);
  CHECK(rig.counter("storage_queried") == queried);
  rig.require_clean();
}

TEST_CASE("AC-54 a page that fails ends the prefix there, and each slot is given back once") {
  StorageDaemon rig(R"({"memory": {"fail_get_every": 6}})");
  TestRank rank(rig.daemon(), "engine", 0, spec_with(64));
  const auto hashes = prompt(5, 16);
  rig.store(rank, 1, hashes);
  const auto lease = reserve(rank, 2, hashes).lease;
  const auto result = rank.run(rank.session().prefetch(lease, 0, 16, kComplete));
  CHECK(result.hits == 16);
  CHECK(result.written == 5);
  CHECK(result.dropped == 11);
  CHECK(rank.run(rank.session().load(lease, 5, TestRank::pages(0, 1))).status == Status::not_found);
  CHECK(loads_right(rank, lease, hashes, 5));
  CHECK(eventually([&] { return rig.counter("resident_pages") == 5; }));
  CHECK(rig.counter("used_pool_bytes") == 5 * spec_with(64).slot_bytes());
  CHECK(rig.counter("prefetching_pages") == 0);
  rank.run(rank.session().release(lease));
  rig.require_clean();
  // What was given up can be written.
  CHECK(write_prompt(rank, 3, hashes) == 11);
}

TEST_CASE("AC-55 what arrives after the end of a prefetch changes nothing") {
  const StallFile stall;
  StorageDaemon rig(R"({"memory": {"delay_us": 2000, "stall_while": ")" + stall.path() + R"("}})");
  TestRank rank(rig.daemon(), "engine", 0, spec_with(4));
  const auto hashes = prompt(6, 32);
  rig.store(rank, 1, hashes);
  const auto lease = reserve(rank, 2, hashes).lease;
  const Ticket ticket = TestRank::take(rank.session().prefetch(lease, 0, 32, kComplete));
  REQUIRE(eventually([&] { return rank.session().probe(hashes).leading >= 2; }));
  stall.begin();
  const auto ended = rank.run(rank.session().end_prefetch(lease, 1));
  CHECK(ended.filling == 0);
  CHECK(ended.written >= 2);
  CHECK(ended.written < 32);
  CHECK(rank.run(ticket).written == ended.written);
  // One page is being read: its slot waits for it, whatever has become of the prefetch.
  CHECK(rig.counter("resident_pages") >= ended.written);
  stall.end();
  CHECK(eventually([&] { return rig.counter("resident_pages") == ended.written; }));
  CHECK(rank.run(rank.session().check_prefetch(lease, 2)).written == ended.written);
  CHECK(loads_right(rank, lease, hashes, ended.written));
  rank.run(rank.session().release(lease));
  rig.require_clean();
}

TEST_CASE("AC-56 the end is one for all ranks: what was there counts as there, what came as come") {
  StorageDaemon rig(R"({"memory": {"fail_get_every": 10}})");
  Group group(rig.daemon(), spec_with(64, 4));
  const auto hashes = prompt(7, 12);
  REQUIRE(group.write_all(1, hashes) == 12);
  rig.sync();
  rig.ask({"evict", "10"});  // 128 tokens stay
  const LeaseId lease = group.reserve_all(2, hashes);
  std::vector<Ticket> tickets;
  for (auto& rank : group.ranks)
    tickets.push_back(TestRank::take(rank->session().prefetch(lease, 0, 12, kComplete)));
  for (std::size_t i = 0; i < 4; ++i) {
    const auto result = group[i].run(tickets[i]);
    CHECK(result.present == 2);
    CHECK(result.written == 9);  // 704 tokens in all, 576 of them new
    CHECK(result.dropped == 1);
    CHECK(loads_right(group[i], lease, hashes, 11));
  }
  CHECK(eventually([&] { return rig.counter("resident_pages") == 11; }));
  group.release_all(lease);
  rig.require_clean();
}

TEST_CASE("AC-57 every rank gets the same answer to the same question, whenever it asks") {
  const StallFile stall;
  StorageDaemon rig(R"({"memory": {"stall_while": ")" + stall.path() + R"("}})");
  Group group(rig.daemon(), spec_with(4, 3));
  const auto hashes = prompt(8, 6);
  REQUIRE(group.write_all(1, hashes) == 6);
  rig.sync();
  rig.empty_pool();
  const LeaseId lease = group.reserve_all(2, hashes);
  stall.begin();
  const Ticket ticket = TestRank::take(group[0].session().prefetch(lease, 0, 6, kComplete));
  // Not yet, for the first who asks question 1 and so for all.
  CHECK(group[0].run(group[0].session().check_prefetch(lease, 1)).filling > 0);
  CHECK(group[2].run(group[2].session().check_prefetch(lease, 1)).filling > 0);
  stall.end();
  CHECK(group[0].run(ticket).written == 6);
  CHECK(group[1].run(group[1].session().check_prefetch(lease, 1)).filling > 0);
  // Everything has come: question 2.
  for (std::size_t i : {2u, 0u, 1u}) {
    const auto answer = group[i].run(group[i].session().check_prefetch(lease, 2));
    CHECK(answer.filling == 0);
    CHECK(answer.written == 6);
  }
  // A question ahead of the group's order is refused.
  CHECK(group[0].run(group[0].session().check_prefetch(lease, 9)).status == Status::invalid_argument);
  group.release_all(lease);

  // One rank ends it: all hear of it, under the number of that question.
  rig.empty_pool();
  stall.begin();
  const LeaseId second = group.reserve_all(3, hashes);
  REQUIRE(group[1].session().prefetch(second, 0, 6, kComplete).ok());
  REQUIRE(eventually([&] { return rig.counter("prefetches") == 2; }));
  CHECK(group[0].run(group[0].session().check_prefetch(second, 1)).filling > 0);
  CHECK(group[1].run(group[1].session().end_prefetch(second, 2)).filling == 0);
  CHECK(group[0].run(group[0].session().check_prefetch(second, 2)).filling == 0);
  CHECK(group[2].run(group[2].session().check_prefetch(second, 1)).filling > 0);
  CHECK(group[2].run(group[2].session().end_prefetch(second, 2)).filling == 0);
  stall.end();
  group.release_all(second);
  rig.require_clean();
}

TEST_CASE("AC-58 a prefetch is not complete before storage was asked") {
  const StallFile stall;
  StorageDaemon rig(R"({"memory": {"stall_while": ")" + stall.path() + R"("}})");
  TestRank rank(rig.daemon(), "engine", 0, spec_with(4));
  const auto hashes = prompt(9, 3);
  stall.begin();
  const auto lease = reserve(rank, 1, hashes).lease;
  const Ticket ticket = TestRank::take(rank.session().prefetch(lease, 0, 3, kComplete));
  const auto early = rank.run(rank.session().check_prefetch(lease, 1));
  CHECK(early.status == Status::ok);
  CHECK(early.filling == 3);
  stall.end();
  const auto result = rank.run(ticket);
  CHECK(result.status == Status::ok);
  CHECK(result.hits == 0);
  CHECK(rank.run(rank.session().check_prefetch(lease, 2)).filling == 0);
}

TEST_CASE("best_effort ends at the first question, timeout at its limit, and a deadline ends everything") {
  const StallFile stall;
  StorageDaemon rig(R"({"prefetch_timeout_base_ms": 50, "prefetch_timeout_per_ki_token_ms": 0,
                     "memory": {"stall_while": ")" +
                    stall.path() + R"("}})");
  TestRank rank(rig.daemon(), "engine", 0, spec_with(4));
  const auto hashes = prompt(10, 5);
  rig.store(rank, 1, hashes);
  stall.begin();
  auto lease = reserve(rank, 2, hashes).lease;
  REQUIRE(rank.session().prefetch(lease, 0, 5, PrefetchPolicy::best_effort).ok());
  CHECK(rank.run(rank.session().check_prefetch(lease, 1)).filling == 0);
  rank.run(rank.session().release(lease));
  // Nobody asks: the limit ends it.
  lease = reserve(rank, 3, hashes).lease;
  auto result = rank.run(rank.session().prefetch(lease, 0, 5, PrefetchPolicy::timeout));
  CHECK(result.status == Status::ok);
  CHECK(result.written == 0);
  rank.run(rank.session().release(lease));
  lease = reserve(rank, 4, hashes).lease;
  result = rank.run(rank.session().prefetch(lease, 0, 5, kComplete, 30));
  CHECK(result.status == Status::timed_out);
  // A release ends it too.
  rank.run(rank.session().release(lease));
  lease = reserve(rank, 5, hashes).lease;
  const Ticket open = TestRank::take(rank.session().prefetch(lease, 0, 5, kComplete));
  rank.run(rank.session().release(lease));
  CHECK(rank.run(open).status == Status::ok);
  stall.end();
  CHECK(eventually([&] { return rig.counter("resident_pages") == 0; }));
  rig.require_clean();
}

TEST_CASE("AC-60 a backup operation stops at the batch in which a page was lost, and ends once") {
  StorageDaemon rig(R"({"memory": {"fail_put_every": 200}})");
  TestRank rank(rig.daemon(), "engine", 0, spec_with(64));
  const auto hashes = prompt(11, 300);
  const auto lease = reserve(rank, 1, hashes).lease;
  // Device pages may serve twice: what they hold does not matter here.
  std::vector<DevicePage> pages;
  for (std::uint32_t i = 0; i < 300; ++i) pages.push_back(DevicePage{i % TestRank::kDevicePages});
  CHECK(rank.run(rank.session().write(lease, 0, pages)).written == 300);
  rig.sync();
  CHECK(rig.counter("backups") == 1);
  CHECK(rig.counter("backups_ended") == 1);
  // 128 of the first batch, 127 of the second: the seed system gives no credit for a batch that failed.
  CHECK(rig.counter("backed_up") == 255);
  CHECK(rig.counter("backup_failed") == 1 + 44);
  CHECK(rig.counter("storing_pages") == 0);
  // The pages are still dirty: the next use of them tries again.
  rank.run(rank.session().release(lease));
  rig.sync();
  CHECK(rig.counter("backups") == 2);
  CHECK(rig.counter("backed_up") == 300);
  rig.require_clean();
}

TEST_CASE("AC-61 a page of an MLA group is backed up once, and every rank's write has its end") {
  StorageDaemon rig;
  const NamespaceSpec spec = spec_with(4, 8, Attention::mla);
  Group group(rig.daemon(), spec);
  const auto hashes = prompt(12, 8);
  CHECK(group.write_all(1, hashes) == 8);
  rig.sync();
  CHECK(rig.counter("backed_up") == 8);
  CHECK(rig.counter("bytes_backed_up") == 8 * spec.shard_bytes());
  CHECK(rig.counter("backups") == rig.counter("backups_ended"));
  const auto backend = rig.ask({"storage", "status"}).at("backend");
  CHECK(backend.at("pages") == 8);
}

TEST_CASE("AC-62 of a batch with a page that was not kept the others are kept") {
  StorageDaemon rig(R"({"memory": {"fail_put_every": 2}})");
  TestRank rank(rig.daemon(), "engine", 0, spec_with(4));
  const auto hashes = prompt(13, 3);
  const auto lease = reserve(rank, 1, hashes).lease;
  CHECK(rank.run(rank.session().write(lease, 0, TestRank::pages(0, 3))).written == 3);
  rig.sync();
  CHECK(rig.counter("backups_ended") == 1);
  CHECK(rig.counter("backed_up") == 2);
  CHECK(rig.counter("backup_failed") == 1);
}

TEST_CASE("AC-63 several prefetches end in any order, and every rank reads the same ends") {
  StorageDaemon rig(R"({"prefetch_threshold_tokens": 16, "memory": {"fail_get_every": 11}})");
  Group group(rig.daemon(), spec_with(4, 4));
  std::vector<std::vector<PrefixHash>> prompts;
  for (std::uint32_t i = 0; i < 4; ++i) prompts.push_back(prompt(20 + i, 8));
  REQUIRE(group.write_all(1, prompts[0]) == 8);                                    // complete
  REQUIRE(group.write_all(2, prompts[1]) == 8);                                    // cut by a failure
  REQUIRE(group.write_all(3, {prompts[2].begin(), prompts[2].begin() + 2}) == 2);  // revoked
  rig.sync();
  rig.empty_pool();
  std::vector<LeaseId> leases;
  for (std::uint32_t i = 0; i < 4; ++i) leases.push_back(group.reserve_all(4 + i, prompts[i]));
  std::vector<std::array<Ticket, 4>> tickets(4);
  for (std::size_t r = 0; r < 4; ++r) {
    // Each rank in an order of its own, and the last one late.
    for (std::size_t i = 0; i < 4; ++i) {
      const std::size_t which = r == 0 ? i : (r * 3 + i) % 4;
      tickets[r][which] = TestRank::take(group[r].session().prefetch(leases[which], 0, 8, kComplete));
    }
  }
  std::vector<std::array<std::uint32_t, 4>> came(4);
  for (std::size_t r = 0; r < 4; ++r) {
    for (std::size_t i = 0; i < 4; ++i) came[r][i] = group[r].run(tickets[r][i]).written;
    CHECK(came[r] == came[0]);
  }
  // Storage reads the first two in whichever order; the eleventh page that it reads fails.
  const auto [cut, whole] = std::minmax(came[0][0], came[0][1]);
  CHECK(whole == 8);
  CHECK((cut >= 2 && cut < 8));
  CHECK((came[0][2] == 0 && came[0][3] == 0));
  for (const LeaseId lease : leases) group.release_all(lease);
  CHECK(eventually([&, pages = whole + cut] { return rig.counter("resident_pages") == pages; }));
  CHECK(rig.counter("prefetching_pages") == 0);
  rig.require_clean();
}

TEST_CASE("a page that two engines want is read once") {
  const StallFile stall;
  StorageDaemon rig(R"({"memory": {"stall_while": ")" + stall.path() + R"("}})");
  TestRank a(rig.daemon(), "engine-a", 0, spec_with(4));
  TestRank b(rig.daemon(), "engine-b", 0, spec_with(4));
  const auto hashes = prompt(30, 10);
  rig.store(a, 1, hashes);
  const auto gets = [&] { return rig.ask({"storage", "status"}).at("operations").at("get").at("pages"); };
  const auto lease_a = reserve(a, 2, hashes).lease;
  const auto lease_b = reserve(b, 1, hashes).lease;
  stall.begin();
  const Ticket ticket_a = TestRank::take(a.session().prefetch(lease_a, 0, 10, kComplete));
  const Ticket ticket_b = TestRank::take(b.session().prefetch(lease_b, 0, 10, kComplete));
  SECTION("both get it") {
    stall.end();
    CHECK(a.run(ticket_a).written == 10);
    CHECK(b.run(ticket_b).written == 10);
    CHECK(loads_right(a, lease_a, hashes, 10));
    a.run(a.session().release(lease_a));
  }
  SECTION("the first one gives up, the second one still gets it") {
    stall.end();
    REQUIRE(
        eventually([&] { return rig.counter("prefetch_shared") > 0 || rig.counter("prefetched") == 10; }));
    a.run(a.session().end_prefetch(lease_a, 1));
    a.run(a.session().release(lease_a));
    CHECK(b.run(ticket_b).written + b.session().probe(hashes).leading >= 10);
  }
  CHECK(loads_right(b, lease_b, hashes, 10));
  CHECK(gets() == 10);
  b.run(b.session().release(lease_b));
  rig.require_clean();
}

TEST_CASE("pages become loadable one by one while the rest is being read") {
  StorageDaemon rig(R"({"memory": {"delay_us": 3000}})");
  TestRank rank(rig.daemon(), "engine", 0, spec_with(4));
  const auto hashes = prompt(31, 40);
  rig.store(rank, 1, hashes);
  const auto lease = reserve(rank, 2, hashes).lease;
  const Ticket ticket = TestRank::take(rank.session().prefetch(lease, 0, 40, kComplete));
  REQUIRE(eventually([&] { return rank.session().probe(hashes).leading > 0; }));
  CHECK(loads_right(rank, lease, hashes, 1));
  CHECK(rank.session().probe(hashes).leading < 40);
  CHECK(rank.run(ticket).written == 40);
  CHECK(loads_right(rank, lease, hashes, 40));
}

TEST_CASE("storage that stalls shortens loads, is suspended and comes back; the daemon stays") {
  const StallFile stall;
  StorageDaemon rig(R"({"batch_deadline_ms": 50, "breaker_failures": 3, "breaker_suspend_ms": 50,
                     "memory": {"threads": 4, "stall_while": ")" +
                    stall.path() + R"("}})");
  TestRank rank(rig.daemon(), "engine", 0, spec_with(4));
  std::vector<std::vector<PrefixHash>> prompts;
  std::uint64_t sequence = 0;
  for (std::uint32_t i = 0; i < 6; ++i) {
    prompts.push_back(prompt(40 + i, 6));
    rig.store(rank, ++sequence, prompts.back());
  }
  stall.begin();
  for (const auto& hashes : prompts) {
    const auto lease = reserve(rank, ++sequence, hashes).lease;
    const auto result = rank.run(rank.session().prefetch(lease, 0, 6, kComplete));
    CHECK(result.status == Status::ok);
    CHECK(result.written == 0);  // a miss, not an error
    rank.run(rank.session().release(lease));
  }
  CHECK(rig.counter("storage_late") >= 3);
  CHECK(rig.counter("storage_suspensions") == 1);
  CHECK(rig.counter("prefetch_no_storage") >= 1);
  CHECK(rig.ask({"storage", "status"}).at("state") == "suspended");
  // The engine computes the pages: they are kept in the pool, and not in storage.
  CHECK(write_prompt(rank, ++sequence, prompt(50, 6)) == 6);
  rig.sync();
  rig.require_clean();
  stall.end();
  REQUIRE(eventually([&] { return rig.ask({"storage", "status"}).at("state") == "attached"; }));
  const auto lease = reserve(rank, ++sequence, prompts[5]).lease;
  CHECK(rank.run(rank.session().prefetch(lease, 0, 6, kComplete)).written == 6);
  CHECK(loads_right(rank, lease, prompts[5], 6));
  rig.require_clean();
}

TEST_CASE("a read that comes back after its deadline does not touch what has its place by then") {
  const StallFile stall;
  StorageDaemon rig(R"({"batch_deadline_ms": 30, "breaker_failures": 0,
                     "memory": {"threads": 1, "stall_while": ")" +
                        stall.path() + R"("}})",
                    R"({"pool": {"bytes": "64KiB", "segment_bytes": "64KiB", "max_pages": 8}})");
  const NamespaceSpec spec = spec_with(4);
  REQUIRE(spec.slot_bytes() == 4096);
  TestRank rank(rig.daemon(), "engine", 0, spec);
  const auto stored = prompt(60, 4);
  rig.store(rank, 1, stored);
  stall.begin();
  auto lease = reserve(rank, 2, stored).lease;
  CHECK(rank.run(rank.session().prefetch(lease, 0, 4, kComplete)).written == 0);
  rank.run(rank.session().release(lease));
  // Four of the eight pages wait for storage. The others are all there is.
  CHECK(rig.counter("resident_pages") <= 4);
  const auto fresh = prompt(61, 8);
  lease = reserve(rank, 3, fresh).lease;
  for (std::uint32_t i = 0; i < 8; ++i) rank.fill(DevicePage{i}, fresh[i]);
  const auto written = rank.run(rank.session().write(lease, 0, TestRank::pages(0, 8))).written;
  CHECK(written >= 4);
  stall.end();
  CHECK(eventually([&] { return rig.counter("resident_pages") == written; }));
  CHECK(loads_right(rank, lease, fresh, written));
  rig.require_clean();
}

TEST_CASE("backends come and go under traffic") {
  StorageDaemon rig;
  TestRank rank(rig.daemon(), "engine", 0, spec_with(4));
  const auto hashes = prompt(70, 5);
  rig.store(rank, 1, hashes);
  rig.ask({"storage", "detach"});
  CHECK(rig.ask({"storage", "status"}).at("state") == "detached");
  CHECK_FALSE(control(rig.daemon().socket_path(), {"storage", "detach"}).ok());
  auto lease = reserve(rank, 2, hashes).lease;
  auto result = rank.run(rank.session().prefetch(lease, 0, 5));
  CHECK(result.status == Status::ok);
  CHECK(result.hits == 0);
  rank.run(rank.session().release(lease));
  // Another life of the memory backend is empty; what the pool holds goes there when it is used again.
  CHECK(write_prompt(rank, 3, hashes) == 5);
  rig.ask({"storage", "attach", "memory", R"({"threads": 2})"});
  const auto refused = control(rig.daemon().socket_path(), {"storage", "attach", "foo"});
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().message.find("attached") != std::string::npos);
  lease = reserve(rank, 4, hashes).lease;
  rank.run(rank.session().release(lease));
  rig.sync();
  rig.empty_pool();
  lease = reserve(rank, 5, hashes).lease;
  CHECK(rank.run(rank.session().prefetch(lease, 0, 5, kComplete)).written == 5);
  CHECK(loads_right(rank, lease, hashes, 5));
  rank.run(rank.session().release(lease));
  const auto shown = run_program({program("hicache-ctl"), rig.daemon().name(), "--socket",
                                  rig.daemon().socket_path(), "storage", "status"});
  INFO(shown.out + shown.err);
  CHECK(shown.status.exited_with(0));
  for (const char* text : {"storage attached: memory, 5 pages", "breaker closed, 0 failures", "\nput "}) {
    CHECK(shown.out.find(text) != std::string::npos);
  }
  rig.ask({"storage", "clear"});
  rig.empty_pool();
  lease = reserve(rank, 6, hashes).lease;
  CHECK(rank.run(rank.session().prefetch(lease, 0, 5, kComplete)).hits == 0);
  rig.require_clean();
}

TEST_CASE("the queue of backups is bounded and drops instead of blocking") {
  const StallFile stall;
  StorageDaemon rig(R"({"backup_queue_pages": 4, "write_batches": 1,
                     "memory": {"stall_while": ")" +
                    stall.path() + R"("}})");
  TestRank rank(rig.daemon(), "engine", 0, spec_with(4));
  stall.begin();
  for (std::uint32_t i = 0; i < 4; ++i) CHECK(write_prompt(rank, i + 1, prompt(80 + i, 6)) == 6);
  CHECK(rig.counter("backup_full") > 0);
  CHECK(rig.counter("backup_queue_pages") <= 4);
  stall.end();
  rig.sync();
  CHECK(rig.counter("backups") == rig.counter("backups_ended"));
  rig.require_clean();
}

TEST_CASE("write_through_selective keeps what was used twice, write_back what is about to go") {
  SECTION("selective") {
    StorageDaemon rig(R"({"backup_policy": "write_through_selective", "backup_uses": 2})");
    TestRank rank(rig.daemon(), "engine", 0, spec_with(4));
    const auto hashes = prompt(90, 5);
    write_prompt(rank, 1, hashes);
    rig.sync();
    CHECK(rig.counter("backed_up") == 0);
    write_prompt(rank, 2, {hashes.begin(), hashes.begin() + 3});
    rig.sync();
    CHECK(rig.counter("backed_up") == 3);
  }
  SECTION("write_back") {
    StorageDaemon rig(
        R"({"backup_policy": "write_back"})",
        R"({"pool": {"max_pages": 40}, "eviction": {"high_watermark": 0.75, "low_watermark": 0.5}})");
    TestRank rank(rig.daemon(), "engine", 0, spec_with(4));
    const auto first = prompt(91, 12);
    write_prompt(rank, 1, first);
    rig.sync();
    CHECK(rig.counter("backed_up") == 0);
    for (std::uint32_t i = 0; i < 3; ++i) write_prompt(rank, 2 + i, prompt(92 + i, 8));
    REQUIRE(eventually([&] { return rig.counter("resident_pages") <= 20; }));
    CHECK(rig.counter("backed_up") >= 10);
    CHECK(rig.counter("evicted_dirty") == 0);
    const auto lease = reserve(rank, 10, first).lease;
    rank.run(rank.session().prefetch(lease, 0, 12, kComplete));
    CHECK(loads_right(rank, lease, first, 12));
    rig.require_clean();
  }
}

TEST_CASE("AC-74 the death of a rank ends its prefetch and returns what it held") {
  const StallFile stall;
  StorageDaemon rig(R"({"memory": {"stall_while": ")" + stall.path() + R"("}})");
  const auto hashes = prompt(95, 8);
  {
    TestRank writer(rig.daemon(), "writer", 0, spec_with(4));
    rig.store(writer, 1, hashes);
  }
  stall.begin();
  Child child = Child::run([&] {
    TestRank rank(rig.daemon(), "dying", 0, spec_with(4));
    const auto lease = rank.run(rank.session().reserve(1, hashes)).lease;
    if (!rank.session().prefetch(lease, 0, 8, kComplete).ok()) return 1;
    for (;;) ::pause();
  });
  REQUIRE(eventually([&] { return rig.counter("prefetches") == 1; }));
  child.kill(SIGKILL);
  child.wait();
  REQUIRE(eventually([&] { return rig.counter("live_leases") == 0; }));
  stall.end();
  CHECK(eventually([&] { return rig.counter("resident_pages") == 0; }));
  CHECK(rig.counter("prefetching_pages") == 0);
  rig.require_clean();
}

TEST_CASE("the controller fetches what a request lacks, and every rank's tree takes over the same") {
  StorageDaemon rig;
  const NamespaceSpec spec = spec_with(4, 2);
  const auto hashes = prompt(99, 10);
  {
    Group writer(rig.daemon(), spec, "writer");
    REQUIRE(writer.write_all(1, hashes) == 10);
    rig.sync();
  }
  rig.empty_pool();
  ControllerRank rank0(rig.daemon(), 0, spec);
  ControllerRank rank1(rig.daemon(), 1, spec);
  for (ControllerRank* r : {&rank0, &rank1}) {
    CHECK(TestRank::take(r->controller->check_prefetch_progress("unknown")).ended);
    REQUIRE(r->controller->prefetch("request", hashes, kComplete).ok());
    CHECK(r->controller->prefetch("request", hashes).status() == Status::exists);
  }
  PrefetchProgress progress0;
  do {
    progress0 = TestRank::take(rank0.controller->check_prefetch_progress("request"));
    const auto progress1 = TestRank::take(rank1.controller->check_prefetch_progress("request"));
    CHECK(progress0.ended == progress1.ended);
    CHECK(progress0.ready == progress1.ready);
    CHECK(progress0.fetched_tokens == progress1.fetched_tokens);
  } while (!progress0.ended);
  CHECK(progress0.ready == hashes);
  CHECK(progress0.fetched_tokens == 40);
  std::vector<std::vector<std::uint64_t>> slots;
  for (ControllerRank* r : {&rank0, &rank1}) {
    CHECK(r->controller->ongoing_prefetches() == 0);
    CHECK(TestRank::take(r->tree->adopt(progress0.ready)) == 40);
    const auto match = r->tree->match(hashes);
    CHECK(match.host_tokens == 40);
    slots.push_back(TestRank::take(r->tree->load_back(match.host_node, 1000)).device_slots);
    r->spoil(slots.back());
    CHECK(TestRank::take(r->controller->start_loading()) == 0);
  }
  CHECK(rank0.acks(1).at(0).status == Status::ok);
  CHECK(rank1.acks(1).at(0).status == Status::ok);
  CHECK(rank0.holds(slots[0], hashes));
  CHECK(rank1.holds(slots[1], hashes));
  // An aborted request, and a prefetch that a reset finds.
  for (ControllerRank* r : {&rank0, &rank1}) REQUIRE(r->controller->prefetch("aborted", prompt(98, 4)).ok());
  for (ControllerRank* r : {&rank0, &rank1}) CHECK(r->controller->release_aborted_request("aborted").ok());
  for (ControllerRank* r : {&rank0, &rank1}) REQUIRE(r->controller->prefetch("late", prompt(97, 4)).ok());
  for (ControllerRank* r : {&rank0, &rank1}) {
    CHECK(r->controller->reset().ok());
    CHECK(r->controller->ongoing_prefetches() == 0);
  }
  CHECK(rig.counter("live_leases") == 0);
  rig.require_clean();
}

TEST_CASE("wrong storage commands are refused with what was expected") {
  StorageDaemon rig;
  const auto bad = control(rig.daemon().socket_path(), {"storage", "polish"});
  REQUIRE_FALSE(bad.ok());
  CHECK(bad.error().message.find("expected status, sync, attach") != std::string::npos);
  const auto settings = control(rig.daemon().socket_path(), {"storage", "attach", "memory", "{"});
  REQUIRE_FALSE(settings.ok());
  CHECK(settings.error().message.find("JSON object") != std::string::npos);
}

}  // namespace hicache::test
