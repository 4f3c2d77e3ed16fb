// A scheduler dies. It holds leases for the ranks of its engine, and has no device pages of its own.
#include <csignal>
#include <cstdio>
#include <memory>
#include <optional>

#include "hicache/controller/pool_pins.hpp"
#include "tests/crash/crash_rig.hpp"
#include "tests/crash/region_surgeon.hpp"
#include "tests/support/catch.hpp"

using namespace hicache;
using namespace hicache::test;

namespace {

constexpr std::uint32_t kReady = 4;    // pages of prompt 1, there before
constexpr std::uint32_t kMissing = 3;  // of prompt 2: not

enum class Moment { attached, lease_posted, lease_held, prefix_pinned, asleep };

std::unique_ptr<Session> scheduler_of(const TestDaemon& daemon, const NamespaceSpec& spec) {
  AttachOptions options;
  options.socket_path = daemon.socket_path();
  options.engine = "engine";
  options.role = Role::scheduler;
  options.spec = spec;
  return TestRank::take(Session::attach(options));
}

// Comes to that moment, says so with the lease that it has for the missing pages (0 = none), and stays there.
Child scheduler(const TestDaemon& daemon, const NamespaceSpec& spec, Moment moment) {
  return Child::run([&daemon, spec, moment]() -> int {
    const auto session = scheduler_of(daemon, spec);
    PoolPins pins(*session, 8);
    std::uint64_t lease = 0;
    std::optional<Ticket> last;
    if (moment == Moment::prefix_pinned) TestRank::take(pins.pin(prompt(1, kReady), 1'000'000));
    if (moment != Moment::attached) {
      last = TestRank::take(session->reserve(moment == Moment::prefix_pinned ? 100 : 1, prompt(2, kMissing)));
      if (moment != Moment::lease_posted) {
        const auto reserved = TestRank::take(session->wait(*last, kPatienceMs));
        if (reserved.status != Status::ok) return 1;
        lease = reserved.lease.value;
      }
    }
    std::printf("%llu\n", static_cast<unsigned long long>(lease));
    std::fflush(stdout);
    if (moment == Moment::asleep) {
      // A backup of pages that are being filled ends when they are.
      const auto ask = TestRank::take(session->backup(LeaseId{lease}, 0, kMissing));
      static_cast<void>(session->wait(ask, kPatienceMs));
    }
    for (;;) ::pause();
  });
}

}  // namespace

TEST_CASE("a scheduler may be killed at any moment: its leases and pins go, its ranks hear of it and go on") {
  const Moment moment = GENERATE(Moment::attached, Moment::lease_posted, Moment::lease_held,
                                 Moment::prefix_pinned, Moment::asleep);
  INFO(static_cast<int>(moment));
  TestDaemon daemon;
  const NamespaceSpec spec = small_spec(Attention::mha, 1);
  TestRank other(daemon, "other", 0, spec);
  REQUIRE(write_prompt(other, 1, prompt(1, kReady)) == kReady);
  const std::size_t descriptors = descriptor_count(daemon.pid());
  const std::size_t mappings = mapping_count(daemon.pid());
  {
    TestRank rank(daemon, "engine", 0, spec);
    Child child = scheduler(daemon, spec, moment);
    const auto line = child.read_line();
    REQUIRE(line.has_value());
    const LeaseId lease{std::stoull(*line)};
    std::optional<Ticket> write;
    if (lease.value != 0) {
      // A write with the scheduler's lease that can't end: nobody raises its fence.
      write = TestRank::take(rank.session().write(lease, 0, TestRank::pages(0, kMissing), WriteFence{0, 1}));
      rank.run(rank.session().nop());  // it has begun
    }
    child.kill(SIGKILL);
    REQUIRE(child.wait().has_value());
    if (write) {
      const auto ended = rank.session().wait(*write, kPatienceMs);
      REQUIRE(ended.ok());
      CHECK(ended->status == Status::peer_lost);
    }
    // The rank's session lives, and its group does not: it says so at once instead of letting anybody wait.
    CHECK(eventually(
        [&] { return rank.run(rank.session().reserve(50, prompt(3, 2))).status == Status::peer_lost; }));
    CHECK(rank.session().state() == Status::ok);
  }
  // The engine starts again under its name, with a scheduler, and finds what was ready.
  TestRank rank(daemon, "engine", 0, spec);
  const auto next = scheduler_of(daemon, spec);
  const ReadBack read = read_back(rank, 1, prompt(1, kReady));
  CHECK(read.hits == kReady);
  CHECK(read.wrong == 0);
  CHECK(rank.session().probe(prompt(2, kMissing)).leading == 0);  // what was half written is nowhere
  CHECK(write_prompt(rank, 2, prompt(2, kMissing)) == kMissing);
  CHECK(read_back(other, 2, prompt(2, kMissing)).wrong == 0);
  rank.detach();
  next->close();
  CHECK(eventually([&] {
    const RegionSurgeon region(daemon.name());
    return region.counter(Counter::attached_clients) == 1 && region.counter(Counter::live_leases) == 0 &&
           region.counter(Counter::pinned_pages) == 0 &&
           region.counter(Counter::resident_pages) == kReady + kMissing &&
           region.ready_pages().size() == kReady + kMissing;
  }));
  CHECK(eventually([&] { return descriptor_count(daemon.pid()) == descriptors; }));
  CHECK(eventually([&] { return mapping_count(daemon.pid()) == mappings; }));
  CHECK(dump_findings(daemon.name()) == "");
}
