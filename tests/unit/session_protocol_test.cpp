// A session against a coordinator that the test plays: late, slow and lying.
#include <unistd.h>

#include <cstring>
#include <thread>

#include "session_rig.hpp"
#include "shm/prefix_index.hpp"
#include "tests/support/catch.hpp"

using namespace hicache;
using namespace hicache::test;

namespace {

std::uint64_t kicks(const FakeDaemon& daemon) {
  std::uint64_t count = 0;
  return ::read(daemon.kick_fd(), &count, sizeof count) == sizeof count ? count : 0;
}

}  // namespace

TEST_CASE("a no-op goes out whole and its completion comes back once") {
  SessionRig rig;
  const Ticket ticket = TestRank::take(rig.session->nop(123));
  const Submission s = rig.daemon.next();
  REQUIRE(s.opcode == Opcode::nop);
  REQUIRE(s.user_data == ticket.value);
  REQUIRE(s.deadline_ms == 123);
  REQUIRE(s.fence == Submission::kNoFence);
  REQUIRE(s.count == 0);
  Completion c = FakeDaemon::answer(s);
  c.operation_sequence = 42;
  rig.daemon.complete(c);
  const OperationResult result = rig.poll();
  REQUIRE(result.ticket == ticket);
  REQUIRE(result.status == Status::ok);
  REQUIRE(result.operation_sequence == 42);
  REQUIRE(rig.silent());
}

TEST_CASE("only a sleeping coordinator is kicked") {
  SessionRig rig;
  TestRank::take(rig.session->nop());
  REQUIRE(kicks(rig.daemon) == 0);
  rig.daemon.header().daemon_sleeping.store(1);
  TestRank::take(rig.session->nop());
  REQUIRE(kicks(rig.daemon) == 1);
}

TEST_CASE("reading a completion kicks a coordinator that may have slept for want of room") {
  SessionRig rig;
  for (int i = 0; i < 8; ++i) TestRank::take(rig.session->nop());
  for (int i = 0; i < 4; ++i) {
    rig.daemon.complete(FakeDaemon::answer(rig.daemon.next()));
  }
  rig.daemon.header().daemon_sleeping.store(1);
  SECTION("by poll") {
    rig.poll();
  }
  SECTION("by wait_any") {
    TestRank::take(rig.session->wait_any(0));
  }
  REQUIRE(kicks(rig.daemon) == 1);
  // With few operations it can't have: nobody pays for a kick.
  while (rig.session->poll()) {
  }
  kicks(rig.daemon);
  rig.daemon.complete(FakeDaemon::answer(rig.daemon.next()));
  rig.poll();
  REQUIRE(kicks(rig.daemon) == 0);
}

TEST_CASE("lists travel through the arena and results come back from it") {
  SessionRig rig;
  const auto hashes = prompt(1, 5);
  TestRank::take(rig.session->reserve(17, hashes));
  const Submission reserve = rig.daemon.next();
  REQUIRE(reserve.sequence_or_lease == 17);
  REQUIRE(reserve.count == 5);
  REQUIRE(std::memcmp(rig.daemon.arena() + reserve.arena_offset, hashes.data(), 5 * 32) == 0);

  const auto pages = TestRank::pages(10, 3);
  const Ticket ticket = TestRank::take(rig.session->write(LeaseId{5}, 2, pages, WriteFence{7, 99}));
  const Submission write = rig.daemon.next();
  REQUIRE(write.arena_offset != reserve.arena_offset);
  REQUIRE(write.sequence_or_lease == 5);
  REQUIRE(write.first == 2);
  REQUIRE(write.fence == 7);
  REQUIRE(write.fence_value == 99);
  std::uint32_t words[6] = {};
  std::memcpy(words, rig.daemon.arena() + write.arena_offset, sizeof words);
  REQUIRE(words[0] == 10);
  REQUIRE(words[2] == 12);
  words[3] = static_cast<std::uint32_t>(Status::ok);
  words[4] = static_cast<std::uint32_t>(Status::exists);
  words[5] = 0xffff'ffffu;
  std::memcpy(rig.daemon.arena() + write.arena_offset, words, sizeof words);
  Completion c = FakeDaemon::answer(write);
  c.written = 1;
  c.present = 1;
  rig.daemon.complete(c);
  const OperationResult result = rig.poll();
  REQUIRE(result.ticket == ticket);
  REQUIRE(result.lease == LeaseId{5});
  REQUIRE(result.page_status == std::vector<Status>{Status::ok, Status::exists, Status::corrupt});
}

TEST_CASE(
    "a full submission ring, a full arena and taken completion slots are refused with again, and only then") {
  FakeDaemon::Options options;
  options.sq_entries = 8;
  options.cq_entries = 16;
  options.arena_bytes = 4096;
  SessionRig rig(options);
  SECTION("ring") {
    for (int i = 0; i < 8; ++i) REQUIRE(rig.session->nop().ok());
    REQUIRE(rig.session->nop().status() == Status::again);
    rig.daemon.next();
    REQUIRE(rig.session->nop().ok());
  }
  SECTION("completion slots, whether open, in the ring or kept aside") {
    std::vector<Submission> seen;
    for (int i = 0; i < 15; ++i) {
      REQUIRE(rig.session->nop().ok());
      seen.push_back(rig.daemon.next());
    }
    REQUIRE(rig.session->nop().status() == Status::again);
    for (int i = 0; i < 14; ++i) rig.daemon.complete(FakeDaemon::answer(seen[i]));
    REQUIRE(rig.session->nop().status() == Status::again);
    REQUIRE(rig.session->wait(Ticket{seen[14].user_data}, 0).status() ==
            Status::timed_out);  // keeps 14 aside
    REQUIRE(rig.session->nop().status() == Status::again);
    rig.poll();
    REQUIRE(rig.session->nop().ok());
  }
  SECTION("an operation that may return its pages later takes two") {
    for (int i = 0; i < 7; ++i) {
      rig.load();
      rig.daemon.next();
    }
    REQUIRE(rig.session->load(LeaseId{9}, 0, TestRank::pages(0, 1)).status() == Status::again);
    REQUIRE(rig.session->nop().ok());
    REQUIRE(rig.session->nop().status() == Status::again);
  }
  SECTION("arena") {
    const auto hashes = prompt(1, 100);
    REQUIRE(rig.session->reserve(1, hashes).ok());
    REQUIRE(rig.session->reserve(2, hashes).status() == Status::again);
    REQUIRE(rig.session->reserve(2, prompt(1, 200)).status() == Status::too_large);
    rig.daemon.complete(FakeDaemon::answer(rig.daemon.next()));
    rig.poll();
    REQUIRE(rig.session->reserve(2, hashes).ok());
  }
}

TEST_CASE("completions that match no open operation change nothing and are counted") {
  SessionRig rig;
  const auto hashes = prompt(1, 3);
  const Ticket ticket = TestRank::take(rig.session->reserve(1, hashes));
  const Submission s = rig.daemon.next();
  std::uint64_t lies = 0;
  const auto lie = [&](auto&& change) {
    Completion c = FakeDaemon::answer(s);
    change(c);
    rig.daemon.complete(c);
    REQUIRE(rig.silent());
    REQUIRE(rig.session->counters().ignored_completions == ++lies);
  };
  lie([](Completion& c) { c.user_data = 0; });
  lie([](Completion& c) { c.user_data = ~0ull; });
  lie([](Completion& c) { c.user_data += 1; });
  lie([](Completion& c) { c.user_data += 1ull << 16; });
  lie([](Completion& c) { c.opcode = Opcode::write; });
  lie([](Completion& c) { c.status = static_cast<Status>(999); });
  lie([](Completion& c) { c.flags = Completion::kPagesReturned; });
  lie([](Completion& c) { c.flags = Completion::kPagesBusy; });
  lie([](Completion& c) { c.flags = 0x80; });
  lie([](Completion& c) { c.hits = 4; });
  lie([](Completion& c) { c.dropped = 0xffff'ffffu; });
  rig.daemon.complete(FakeDaemon::answer(s));
  REQUIRE(rig.poll().ticket == ticket);
  lie([](Completion&) {});  // the same once more
}

TEST_CASE(
    "pages that are busy are told to be free exactly once, and hold their completion slots until then") {
  SessionRig rig;
  const Ticket ticket = rig.load();
  const Submission s = rig.daemon.next();
  Completion c = FakeDaemon::answer(s, Status::timed_out);
  c.flags = Completion::kPagesBusy;
  rig.daemon.complete(c);
  OperationResult result = rig.poll();
  REQUIRE(result.status == Status::timed_out);
  REQUIRE(result.pages_busy);
  REQUIRE_FALSE(result.pages_returned);
  for (int i = 0; i < 13; ++i) {
    REQUIRE(rig.session->nop().ok());
    rig.daemon.next();
  }
  REQUIRE(rig.session->nop().status() == Status::again);
  c.flags = Completion::kPagesReturned;
  rig.daemon.complete(c);
  result = rig.poll();
  REQUIRE(result.ticket == ticket);
  REQUIRE(result.pages_returned);
  REQUIRE(rig.session->nop().ok());
  rig.daemon.complete(c);
  REQUIRE(rig.silent());
}

TEST_CASE(
    "a hung daemon is reported by the operation's deadline, not as lost, and its late answer returns the "
    "pages") {
  SessionRig rig;
  const Ticket load = rig.load(LayerFence{1, 5}, 50);
  const Submission load_entry = rig.daemon.next();
  TestRank::take(rig.session->reserve(1, prompt(1, 2), 50));
  const Submission reserve_entry = rig.daemon.next();
  const auto ended = rig.session->wait(load, kPatienceMs);
  REQUIRE(ended.ok());
  REQUIRE(ended->status == Status::timed_out);
  REQUIRE(ended->pages_busy);
  REQUIRE(rig.poll().status == Status::timed_out);
  REQUIRE(rig.session->state() == Status::ok);
  REQUIRE(rig.session->wait_layer({1, 5}, 0, kPatienceMs).status() == Status::timed_out);
  REQUIRE(rig.session->counters().expired == 2);

  rig.daemon.complete(FakeDaemon::answer(load_entry));
  const auto returned = rig.session->wait(load, kPatienceMs);
  REQUIRE(returned.ok());
  REQUIRE(returned->pages_returned);

  // Nobody knows of the lease that the late reserve opened: the session gives it back by itself.
  Completion late = FakeDaemon::answer(reserve_entry);
  late.lease = 77;
  rig.daemon.complete(late);
  std::optional<Submission> release;
  REQUIRE(eventually([&] {
    REQUIRE_FALSE(rig.session->poll().has_value());
    return (release = rig.daemon.try_next()).has_value();
  }));
  REQUIRE(release->opcode == Opcode::release);
  REQUIRE(release->sequence_or_lease == 77);
  rig.daemon.complete(FakeDaemon::answer(*release));
  REQUIRE(rig.silent());
  REQUIRE(rig.session->counters().ignored_completions == 0);
}

TEST_CASE("wait takes its own completion and leaves the others for poll in their order") {
  SessionRig rig;
  std::vector<Ticket> tickets;
  for (int i = 0; i < 4; ++i) {
    tickets.push_back(TestRank::take(rig.session->nop()));
    rig.daemon.complete(FakeDaemon::answer(rig.daemon.next()));
  }
  REQUIRE(TestRank::take(rig.session->wait(tickets[2], 1000)).ticket == tickets[2]);
  REQUIRE(rig.session->wait(tickets[2], 1000).status() == Status::not_found);
  REQUIRE(rig.session->wait(Ticket{12345}, 1000).status() == Status::not_found);
  REQUIRE(rig.poll().ticket == tickets[0]);
  REQUIRE(rig.poll().ticket == tickets[1]);
  REQUIRE(TestRank::take(rig.session->wait_any(1000)).ticket == tickets[3]);
  REQUIRE(rig.session->wait_any(5).status() == Status::timed_out);
}

TEST_CASE("several threads wait at once and each gets its own completion, whatever the order") {
  SessionRig rig;
  constexpr int kRounds = 200;
  constexpr std::uint32_t kThreads = 4;
  std::atomic<std::uint32_t> wrong{0};
  std::vector<std::thread> threads;
  for (std::uint32_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) {
        const auto ticket = rig.session->nop();
        if (!ticket) {
          ++wrong;
          return;
        }
        const auto result = rig.session->wait(*ticket, kPatienceMs);
        if (!result || !(result->ticket == *ticket) || result->status != Status::ok) ++wrong;
      }
    });
  }
  std::vector<Submission> held;
  for (std::uint32_t answered = 0; answered < kThreads * kRounds && wrong == 0;) {
    if (const auto s = rig.daemon.try_next()) held.push_back(*s);
    // Newest first, and some only after others came.
    if (!held.empty() &&
        (held.size() >= 2 || answered % 3 == 0 || answered + kThreads > kThreads * kRounds)) {
      rig.daemon.complete(FakeDaemon::answer(held.back()));
      held.pop_back();
      ++answered;
    } else {
      std::this_thread::yield();
      if (!held.empty()) {
        rig.daemon.complete(FakeDaemon::answer(held.back()));
        held.pop_back();
        ++answered;
      }
    }
  }
  for (auto& thread : threads) thread.join();
  REQUIRE(wrong == 0);
  REQUIRE(rig.session->counters().late_wakes == 0);
}

TEST_CASE("a wake-up that the daemon forgets is counted, one that it sends is not") {
  SessionRig rig;
  const auto answer_parked = [&](bool kick) {
    const Ticket ticket = TestRank::take(rig.session->nop());
    Result<OperationResult> result(Status::internal, "");
    std::thread waiter([&] { result = rig.session->wait(ticket, kPatienceMs); });
    const Submission s = rig.daemon.next();
    const bool parked = eventually([&] { return rig.daemon.header().client_waiting.load() == 1; });
    kick ? rig.daemon.complete(FakeDaemon::answer(s)) : rig.daemon.publish(FakeDaemon::answer(s));
    waiter.join();
    REQUIRE(parked);
    REQUIRE(TestRank::take(result).ticket == ticket);
  };
  answer_parked(true);
  REQUIRE(rig.session->counters().late_wakes == 0);
  // Between "waiting" and the sleep itself the client looks again: only a sleeper can miss a wake-up.
  REQUIRE(eventually([&] {
    answer_parked(false);
    return rig.session->counters().late_wakes > 0;
  }));
}

TEST_CASE("layers are announced by their fence words, and a released wait of a failed load fails") {
  SessionRig rig;
  rig.load(LayerFence{0, 1});
  const Submission first = rig.daemon.next();
  REQUIRE(first.fence == 0);
  REQUIRE(first.fence_value == 1);
  LayerFences& words = rig.daemon.fences().load[0];
  REQUIRE_FALSE(rig.session->layer_ready({0, 1}, 0));
  REQUIRE(rig.session->wait_layer({0, 1}, 0, 5).status() == Status::timed_out);
  words.layer[0].store(1, std::memory_order_release);
  REQUIRE(rig.session->wait_layer({0, 1}, 0, kPatienceMs).ok());
  REQUIRE_FALSE(rig.session->layer_ready({0, 1}, 1));
  words.layer[1].store(1, std::memory_order_release);
  rig.daemon.complete(FakeDaemon::answer(first));
  rig.poll();

  rig.load(LayerFence{0, 2});
  const Submission second = rig.daemon.next();
  Result<Unit> waited = success();
  std::thread waiter([&] { waited = rig.session->wait_layer({0, 2}, 1, kPatienceMs); });
  words.failed.store(2, std::memory_order_release);
  words.layer[0].store(2, std::memory_order_release);
  words.layer[1].store(2, std::memory_order_release);
  rig.daemon.complete(FakeDaemon::answer(second, Status::peer_lost));
  waiter.join();
  REQUIRE(waited.status() == Status::peer_lost);
  // The first load was fine, and stays so although the word of the slot has gone on.
  REQUIRE(rig.session->wait_layer({0, 1}, 0, kPatienceMs).ok());

  REQUIRE(rig.session->load(LeaseId{9}, 0, TestRank::pages(0, 1), LayerFence{0, 2}).status() ==
          Status::invalid_argument);
  REQUIRE(rig.session->load(LeaseId{9}, 0, TestRank::pages(0, 1), LayerFence{3, 1}).status() ==
          Status::invalid_argument);
}

TEST_CASE("a load refused before its transfer began releases its waiters as failed") {
  SessionRig rig;
  rig.load(LayerFence{1, 1});
  rig.daemon.complete(FakeDaemon::answer(rig.daemon.next(), Status::unknown_lease));
  REQUIRE(rig.session->wait_layer({1, 1}, 0, kPatienceMs).status() == Status::unknown_lease);
}

TEST_CASE("write fences only grow") {
  SessionRig rig;
  rig.session->raise_write_fence(3, 10);
  rig.session->raise_write_fence(3, 9);
  rig.session->raise_write_fence(kWriteFences, 1);
  REQUIRE(rig.daemon.fences().write[3].value.load() == 10);
}

TEST_CASE("what can't be right is refused before it is posted") {
  SessionRig rig;
  const auto pages = TestRank::pages(0, 1);
  REQUIRE(rig.session->reserve(0, prompt(1, 1)).status() == Status::invalid_argument);
  REQUIRE(rig.session->reserve(1, {}).status() == Status::invalid_argument);
  REQUIRE(rig.session->reserve(1, std::vector<PrefixHash>(kMaxPagesPerOperation + 1)).status() ==
          Status::too_large);
  REQUIRE(rig.session->write(LeaseId{1}, 0, {}).status() == Status::invalid_argument);
  REQUIRE(rig.session->write(LeaseId{1}, 0, TestRank::pages(SessionRig::kPages, 1)).status() ==
          Status::invalid_argument);
  REQUIRE(rig.session->write(LeaseId{1}, 0, pages, WriteFence{kWriteFences, 1}).status() ==
          Status::invalid_argument);
  REQUIRE(rig.session->wait_layer({kProducerSlots, 1}, 0, 1).status() == Status::invalid_argument);
  REQUIRE(rig.session->wait_layer({0, 1}, 2, 1).status() == Status::invalid_argument);
  REQUIRE_FALSE(rig.daemon.try_next().has_value());

  FakeDaemon other;
  auto scheduler = TestRank::take(Session::attach(fake_options(other, Role::scheduler)));
  REQUIRE(scheduler->load(LeaseId{1}, 0, pages).status() == Status::not_permitted);
  FakeDaemon third;
  auto rank = TestRank::take(Session::attach(fake_options(third)));
  REQUIRE(rank->load(LeaseId{1}, 0, pages).status() == Status::invalid_argument);
}

TEST_CASE("a position of the daemon that can't be true ends the session as corrupt") {
  SessionRig rig;
  rig.daemon.header().sq_head.store(1000);
  for (int i = 0; i < 8; ++i) static_cast<void>(rig.session->nop());
  REQUIRE(rig.session->nop().status() == Status::corrupt);
  REQUIRE(rig.poll().status == Status::corrupt);
}

TEST_CASE("probe reads the index without the daemon and follows a bump of the namespace") {
  SessionRig rig;
  Tables& tables = rig.daemon.tables();
  IndexWriter index(tables, 0x5eed);
  const auto hashes = prompt(1, 3);
  for (std::uint32_t i = 0; i < 3; ++i) {
    PageEntry& page = tables.pages[i];
    const NamespaceId ns{i < 2 ? 0u : 1u};
    const std::uint32_t hash_of = i < 2 ? i : 0;
    for (std::size_t w = 0; w < 4; ++w) page.key[w].store(hashes[hash_of].words[w]);
    page.namespace_id.store(ns.value);
    PageWord word;
    word.state = PageState::ready;
    word.generation = Generation{1};
    page.word.store(word.encode());
    index.insert(PageId{i}, index.bucket_of(hashes[hash_of], ns));
  }
  REQUIRE(rig.session->probe(hashes).leading == 2);
  tables.namespaces[1].state.store(static_cast<std::uint32_t>(NamespaceState::active));
  tables.namespaces[1].successor.store(kNone32);
  tables.namespaces[0].successor.store(1);
  tables.namespaces[0].state.store(static_cast<std::uint32_t>(NamespaceState::retired));
  REQUIRE(rig.session->probe(hashes).leading == 1);
  REQUIRE(rig.session->namespace_id() == NamespaceId{1});
  // A circle of damage ends.
  tables.namespaces[1].successor.store(0);
  tables.namespaces[1].state.store(static_cast<std::uint32_t>(NamespaceState::retired));
  static_cast<void>(rig.session->probe(hashes));
}
