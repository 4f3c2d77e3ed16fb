// What became of a backup: told to every rank that asks, exactly once, whatever happens to storage, to the
// group or to the daemon.
#include <unistd.h>

#include <csignal>

#include "tests/support/controller_rank.hpp"
#include "tests/support/storage_group.hpp"

namespace hicache::test {
namespace {

std::string stalled_by(const StallFile& stall, const std::string& more = "") {
  return R"({"memory": {"stall_while": ")" + stall.path() + R"("})" + more + "}";
}

// Writes a prompt as the only rank and asks what becomes of it, the lease given back at once.
Ticket write_and_ask(TestRank& rank, std::uint64_t sequence, const std::vector<PrefixHash>& hashes,
                     std::uint32_t deadline_ms = 0) {
  const auto count = static_cast<std::uint32_t>(hashes.size());
  const LeaseId lease = reserve(rank, sequence, hashes).lease;
  for (std::uint32_t i = 0; i < count; ++i) rank.fill(DevicePage{i}, hashes[i]);
  REQUIRE(rank.run(rank.session().write(lease, 0, TestRank::pages(0, count))).written == count);
  const Ticket ticket = TestRank::take(rank.session().backup(lease, 0, count, deadline_ms));
  REQUIRE(rank.run(rank.session().release(lease)).status == Status::ok);
  return ticket;
}

// Nothing more comes of what has ended.
bool silent(TestRank& rank, Ticket ticket) {
  return rank.session().wait(ticket, 0).status() == Status::not_found && !rank.session().poll();
}

}  // namespace

TEST_CASE("AC-60 AC-61 every rank is told once what storage keeps of a write, and holds no lease meanwhile") {
  const auto attention = GENERATE(Attention::mha, Attention::mla);
  const StallFile stall;
  StorageDaemon rig(stalled_by(stall));
  Group group(rig.daemon(), spec_with(4, 3, attention));
  const auto hashes = prompt(1, 20);
  const LeaseId lease = group.reserve_all(1, hashes);
  stall.begin();
  std::vector<Ticket> writes;
  std::vector<Ticket> asks;
  for (auto& rank : group.ranks) {
    for (std::uint32_t i = 0; i < 20; ++i) rank->fill(DevicePage{i}, hashes[i]);
    writes.push_back(TestRank::take(rank->session().write(lease, 0, TestRank::pages(0, 20))));
    // Its pages are being filled, or not even that: some ranks have not written yet.
    asks.push_back(TestRank::take(rank->session().backup(lease, 0, 20)));
  }
  for (std::size_t i = 0; i < 3; ++i) CHECK(group[i].run(writes[i]).written == 20);
  group.release_all(lease);
  CHECK(rig.counter("live_leases") == 0);
  for (std::size_t i = 0; i < 3; ++i) CHECK_FALSE(group[i].session().poll());
  stall.end();
  for (std::size_t i = 0; i < 3; ++i) {
    const auto ack = group[i].run(asks[i]);
    CHECK(ack.status == Status::ok);
    CHECK(ack.opcode == Opcode::backup);
    CHECK(ack.written == 20);
    CHECK(ack.dropped == 0);
    CHECK(silent(group[i], asks[i]));
  }
  CHECK(rig.counter("backup_asks") == 1);
  CHECK(rig.counter("backed_up") == 20);
  rig.require_clean();
}

TEST_CASE("AC-62 a page that storage did not keep is told, and what it holds already is told at once") {
  const StallFile stall;
  StorageDaemon rig(R"({"memory": {"fail_put_every": 5, "stall_while": ")" + stall.path() + R"("}})");
  TestRank rank(rig.daemon(), "engine", 0, spec_with(4));
  const auto hashes = prompt(2, 8);
  stall.begin();
  const Ticket ticket = write_and_ask(rank, 1, hashes);
  stall.end();
  auto ack = rank.run(ticket);
  CHECK(ack.status == Status::ok);
  CHECK((ack.written == 7 && ack.dropped == 1));
  // Once more: seven are there, the eighth gets another try.
  const LeaseId lease = reserve(rank, 2, hashes).lease;
  ack = rank.run(rank.session().backup(lease, 0, 8));
  CHECK((ack.written == 8 && ack.dropped == 0));
  rank.run(rank.session().release(lease));
  CHECK(rig.counter("backed_up") == 8);
}

TEST_CASE("who asks has pages backed up that the policy would leave for later, but not against it") {
  const std::string policy = GENERATE("none", "write_through_selective", "write_back");
  StorageDaemon rig(R"({"backup_policy": ")" + policy + R"("})");
  TestRank rank(rig.daemon(), "engine", 0, spec_with(4));
  const auto ack = rank.run(write_and_ask(rank, 1, prompt(3, 6)));
  CHECK(ack.status == Status::ok);
  CHECK(ack.written == (policy == "none" ? 0u : 6u));
  CHECK(ack.written + ack.dropped == 6);
  rig.ask({"storage", "detach"});
  const auto without = rank.run(write_and_ask(rank, 2, prompt(4, 6)));
  CHECK((without.status == Status::ok && without.written == 0 && without.dropped == 6));
}

TEST_CASE("a backup that storage is silent about ends by its own deadline, or by that of the batch") {
  const StallFile stall;
  const bool by_batch = GENERATE(false, true);
  StorageDaemon rig(
      stalled_by(stall, by_batch ? R"(, "batch_deadline_ms": 30)" : R"(, "batch_deadline_ms": 600000)"));
  TestRank rank(rig.daemon(), "engine", 0, spec_with(4));
  stall.begin();
  const Ticket ticket = write_and_ask(rank, 1, prompt(5, 4), by_batch ? 0 : 30);
  const auto ack = rank.run(ticket);
  CHECK(ack.status == (by_batch ? Status::ok : Status::timed_out));
  CHECK((ack.written == 0 && ack.dropped == 4));
  stall.end();
  // What comes later is nobody's news.
  REQUIRE(eventually([&] { return rig.counter("storing_pages") == 0; }));
  CHECK(silent(rank, ticket));
  rig.require_clean();
}

TEST_CASE("the death of the daemon is told once to whoever waits for a backup") {
  const StallFile stall;
  StorageDaemon rig(stalled_by(stall));
  TestRank rank(rig.daemon(), "engine", 0, spec_with(4));
  stall.begin();
  const Ticket ticket = write_and_ask(rank, 1, prompt(6, 4));
  rig.daemon().kill9();
  CHECK(rank.run(ticket).status == Status::daemon_lost);
  CHECK(silent(rank, ticket));
}

TEST_CASE("the death of a rank ends what its group waits for, and the backup goes on") {
  const StallFile stall;
  StorageDaemon rig(stalled_by(stall));
  const auto hashes = prompt(7, 5);
  const NamespaceSpec spec = spec_with(4, 2, Attention::mla);
  TestRank rank(rig.daemon(), "engine", 0, spec);
  stall.begin();
  Child other = Child::run([&] {
    TestRank dying(rig.daemon(), "engine", 1, spec);
    const LeaseId lease = dying.run(dying.session().reserve(1, hashes)).lease;
    for (std::uint32_t i = 0; i < 5; ++i) dying.fill(DevicePage{i}, hashes[i]);
    if (dying.run(dying.session().write(lease, 0, TestRank::pages(0, 5))).status != Status::ok) return 1;
    if (!dying.session().backup(lease, 0, 5).ok()) return 1;
    if (dying.run(dying.session().release(lease)).status != Status::ok) return 1;
    for (;;) ::pause();
  });
  OperationResult reserved;
  REQUIRE(eventually([&] {
    reserved = rank.run(rank.session().reserve(1, hashes));
    return reserved.status == Status::ok;
  }));
  for (std::uint32_t i = 0; i < 5; ++i) rank.fill(DevicePage{i}, hashes[i]);
  REQUIRE(rank.run(rank.session().write(reserved.lease, 0, TestRank::pages(0, 5))).status == Status::ok);
  const Ticket ticket = TestRank::take(rank.session().backup(reserved.lease, 0, 5));
  REQUIRE(rank.run(rank.session().release(reserved.lease)).status == Status::ok);
  REQUIRE(eventually([&] { return rig.counter("live_leases") == 0; }));
  other.kill(SIGKILL);
  other.wait();
  CHECK(rank.run(ticket).status == Status::peer_lost);
  CHECK(silent(rank, ticket));
  stall.end();
  CHECK(eventually([&] { return rig.counter("backed_up") == 5; }));
  rig.require_clean();
}

TEST_CASE("a question about a backup that makes no sense is refused, and there is no end of sensible ones") {
  const StallFile stall;
  StorageDaemon rig(stalled_by(stall));
  TestRank rank(rig.daemon(), "engine", 0, spec_with(4));
  const auto hashes = prompt(8, 64);
  const auto count = static_cast<std::uint32_t>(hashes.size());
  CHECK(rank.session().backup(LeaseId{1}, 0, 0).status() == Status::invalid_argument);
  CHECK(rank.session().backup(LeaseId{1}, 0, kMaxPagesPerOperation + 1).status() == Status::too_large);
  CHECK(rank.run(rank.session().backup(LeaseId{12345}, 0, 1)).status == Status::unknown_lease);
  const LeaseId lease = reserve(rank, 1, hashes).lease;
  CHECK(rank.run(rank.session().backup(lease, 60, 5)).status == Status::invalid_argument);
  for (std::uint32_t i = 0; i < count; ++i) rank.fill(DevicePage{i}, hashes[i]);
  stall.begin();
  REQUIRE(rank.run(rank.session().write(lease, 0, TestRank::pages(0, count))).written == count);
  const Ticket whole = TestRank::take(rank.session().backup(lease, 0, count));
  CHECK(rank.run(rank.session().backup(lease, 0, count)).status == Status::exists);
  // Other ranges are other questions, and a lease answers 64 of them. None of the pages was filled by
  // anybody: they end at once.
  const LeaseId other = reserve(rank, 2, prompt(9, 64)).lease;
  std::uint32_t refused = 0;
  for (std::uint32_t first = 0; first < 64; ++first) {
    const auto ack = rank.run(rank.session().backup(other, first, 1));
    CHECK((ack.status == Status::ok && ack.dropped == 1));
  }
  for (std::uint32_t first = 0; first < 10; ++first) {
    refused += rank.run(rank.session().backup(other, first, 2)).status == Status::again;
  }
  CHECK(refused == 10);
  stall.end();
  CHECK(rank.run(whole).written == count);
  rank.run(rank.session().release(other));
  rank.run(rank.session().release(lease));
  rig.require_clean();
}

TEST_CASE("AC-61 a controller that wants them gets one backup ack a write, and no write ack waits for it") {
  const StallFile stall;
  StorageDaemon rig(stalled_by(stall));
  const NamespaceSpec spec = spec_with(4, 2, Attention::mla);
  ControllerRank rank0(rig.daemon(), 0, spec, {}, 0, 4096, "engine", 2);
  ControllerRank rank1(rig.daemon(), 1, spec, {}, 0, 4096, "engine", 2);
  stall.begin();
  for (std::uint32_t i = 0; i < 3; ++i) {
    const auto hashes = prompt(20 + i, 4);
    for (ControllerRank* r : {&rank0, &rank1})
      REQUIRE(r->controller->write(r->compute(hashes), hashes, i).ok());
  }
  for (ControllerRank* r : {&rank0, &rank1}) {
    for (const HiCacheAck& ack : r->acks(3))
      CHECK((ack.kind == OperationKind::write && ack.status == Status::ok));
    // Two wait for storage; the third was not asked about, and says so.
    CHECK(r->controller->open_backups() == 2);
    const auto acks = TestRank::take(r->controller->take_backup_acks());
    REQUIRE(acks.size() == 1);
    CHECK((acks[0].kind == OperationKind::backup && acks[0].status == Status::again));
    CHECK((acks[0].sequence == 3 && acks[0].node_ids.at(0) == 2));
    CHECK(TestRank::take(r->controller->take_backup_acks()).empty());
  }
  stall.end();
  for (ControllerRank* r : {&rank0, &rank1}) {
    std::vector<HiCacheAck> acks;
    while (acks.size() < 2) {
      for (HiCacheAck& ack : TestRank::take(r->controller->take_backup_acks()))
        acks.push_back(std::move(ack));
    }
    for (const HiCacheAck& ack : acks) {
      CHECK(ack.status == Status::ok);
      CHECK((ack.tokens == 16 && ack.host_tokens == 16));
      CHECK((ack.sequence == 1 || ack.sequence == 2));
    }
    CHECK(acks[0].sequence != acks[1].sequence);
    CHECK(r->controller->open_backups() == 0);
  }
  CHECK(rig.counter("backup_asks") == 2);
  rig.require_clean();
}

TEST_CASE("AC-61 the death of the daemon ends each backup that a controller waits for once") {
  const StallFile stall;
  StorageDaemon rig(stalled_by(stall));
  ControllerRank r(rig.daemon(), 0, spec_with(4), {}, 0, 4096, "engine", 8);
  stall.begin();
  for (std::uint32_t i = 0; i < 3; ++i) {
    const auto hashes = prompt(30 + i, 4);
    REQUIRE(r.controller->write(r.compute(hashes), hashes, i).ok());
  }
  r.acks(3);
  rig.daemon().kill9();
  std::vector<HiCacheAck> acks;
  REQUIRE(eventually([&] {
    const auto more = r.controller->take_backup_acks();
    if (!more) return true;
    acks.insert(acks.end(), more->begin(), more->end());
    return false;
  }));
  REQUIRE(acks.size() == 3);
  for (const HiCacheAck& ack : acks) CHECK((ack.status == Status::daemon_lost && ack.host_tokens == 0));
  CHECK(r.controller->take_backup_acks().status() == Status::daemon_lost);
  CHECK(r.controller->reset().ok());
}

TEST_CASE("a reset forgets the backups of its epoch, and a controller that asks for none posts nothing") {
  const StallFile stall;
  StorageDaemon rig(stalled_by(stall));
  {
    ControllerRank r(rig.daemon(), 0, spec_with(4), {}, 0, 4096, "asking", 8);
    stall.begin();
    const auto hashes = prompt(40, 4);
    REQUIRE(r.controller->write(r.compute(hashes), hashes, 1).ok());
    REQUIRE(r.controller->reset().ok());
    const auto again = prompt(41, 4);
    REQUIRE(r.controller->write(r.compute(again), again, 2).ok());
    stall.end();
    std::vector<HiCacheAck> acks;
    REQUIRE(eventually([&] {
      for (HiCacheAck& ack : TestRank::take(r.controller->take_backup_acks())) acks.push_back(std::move(ack));
      return r.controller->open_backups() == 0;
    }));
    REQUIRE(acks.size() == 1);
    CHECK((acks[0].epoch == 1 && acks[0].node_ids.at(0) == 2));
  }
  const auto asked = rig.counter("backup_asks");
  ControllerRank quiet(rig.daemon(), 0, spec_with(4), {}, 0, 4096, "quiet");
  const auto hashes = prompt(42, 4);
  REQUIRE(quiet.controller->write(quiet.compute(hashes), hashes, 1).ok());
  quiet.acks(1);
  CHECK(rig.counter("backup_asks") == asked);
  CHECK(TestRank::take(quiet.controller->take_backup_acks()).empty());
}

}  // namespace hicache::test
