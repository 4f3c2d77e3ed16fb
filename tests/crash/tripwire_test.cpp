// How deaths are noticed, by both sides, and how a session goes on when the daemon is back.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <thread>

#include "shm/clock.hpp"
#include "shm/tripwire.hpp"
#include "tests/crash/crash_rig.hpp"
#include "tests/support/catch.hpp"

using namespace hicache;
using namespace hicache::test;

namespace {

constexpr std::uint64_t kMs = 1'000'000;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

struct SharedWords {
  std::atomic<std::uint32_t> mine{0};
  std::atomic<std::uint32_t> theirs{0};
};
void freeze(TestDaemon& daemon) {
  daemon.child().kill(SIGSTOP);
  const std::string stat = "/proc/" + std::to_string(daemon.pid()) + "/stat";
  REQUIRE(eventually([&] { return contains(read_text(stat), ") T "); }));
}

SharedWords* make_shared_words() {
  void* memory = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  return new (memory) SharedWords;
}

}  // namespace

TEST_CASE("a tripwire fires when its process is killed and not when its thread ends in order") {
  SharedWords* words = make_shared_words();
  Child holder = Child::run([&] {
    TripwireStop stop;
    hold_tripwire(&words->theirs, &words->mine, stop, [](std::uint32_t) { return true; });
    return 0;
  });
  REQUIRE(eventually([&] { return words->theirs.load() != 0; }));
  std::atomic<std::uint64_t> fired_ns{0};
  TripwireStop stop;
  std::thread watcher([&] {
    hold_tripwire(&words->mine, &words->theirs, stop, [&](std::uint32_t word) {
      if (tripwire_fired(word)) fired_ns = monotonic_ns();
      return true;
    });
  });
  REQUIRE(eventually([&] { return words->mine.load() != 0; }));
  CHECK(fired_ns == 0);
  const std::uint64_t killed_ns = monotonic_ns();
  holder.kill(SIGKILL);
  REQUIRE(eventually([&] { return fired_ns != 0; }));
  WARN("tripwire noticed SIGKILL after " << (fired_ns - killed_ns) / 1000 << " us");
  stop.stop(&words->theirs);
  watcher.join();
  CHECK(words->mine.load() == 0);  // let go in order: not fired
  ::munmap(words, 4096);
}

TEST_CASE("a killed rank is fenced by its tripwire although a child of it keeps its socket open") {
  TestDaemon daemon;
  TestRank survivor(daemon, "engine", 0, small_spec(Attention::mha, 2));
  Child rank = Child::run([&] {
    TestRank second(daemon, "engine", 1, small_spec(Attention::mha, 2));
    std::vector<char> ballast(256 << 20);
    std::memset(ballast.data(), 1, ballast.size());  // its address space takes long to go
    if (::fork() == 0) {
      ::sleep(20);  // longer than it takes, and nobody has to end it
      ::_exit(0);
    }
    std::puts("up");
    std::fflush(stdout);
    ::pause();
    return 0;
  });
  REQUIRE(rank.read_line().has_value());
  const auto reserved = survivor.session().reserve(1, prompt(1, 4));
  const auto first = survivor.run(reserved);
  REQUIRE(first.status == Status::ok);
  const auto pages = TestRank::pages(0, 4);
  auto write = survivor.session().write(first.lease, 0, pages);
  REQUIRE(write.ok());
  const std::uint64_t killed_ns = monotonic_ns();
  rank.kill(SIGKILL);
  const auto lost = survivor.session().wait(*write, kPatienceMs);
  const std::uint64_t noticed_ns = monotonic_ns();
  REQUIRE(lost.ok());
  CHECK(lost->status == Status::peer_lost);
  WARN("the other rank heard of the death after " << (noticed_ns - killed_ns) / 1000 << " us");
  CHECK(contains(daemon.log(), "its tripwire fired"));
  CHECK(dump_findings(daemon.name()) == "");
}

TEST_CASE(
    "a waiting rank hears of the daemon's death at once, and keeps its pages until the process is gone") {
  TestDaemon daemon;
  TestRank rank(daemon, "engine", 0, small_spec(Attention::mha, 1));
  const auto reserved = rank.run(rank.session().reserve(1, prompt(1, 4)));
  REQUIRE(reserved.status == Status::ok);
  freeze(daemon);  // so that the write stays open
  auto write = rank.session().write(reserved.lease, 0, TestRank::pages(0, 4));
  REQUIRE(write.ok());
  std::atomic<std::uint64_t> noticed_ns{0};
  std::thread waiter([&] {
    const auto lost = rank.session().wait(*write, kPatienceMs);
    noticed_ns = monotonic_ns();
    if (!lost || lost->status != Status::daemon_lost) noticed_ns = 1;
  });
  const timespec nap{0, 50'000'000};
  ::nanosleep(&nap, nullptr);
  const std::uint64_t killed_ns = monotonic_ns();
  daemon.child().kill(SIGKILL);
  waiter.join();
  REQUIRE(noticed_ns > killed_ns);
  WARN("a waiting rank heard of the daemon's death after " << (noticed_ns - killed_ns) / 1000 << " us");
  CHECK(rank.session().state() == Status::daemon_lost);
  daemon.kill9();
  const auto nothing = rank.session().reserve(2, prompt(1, 4));
  CHECK(nothing.status() == Status::daemon_lost);
  daemon.start();
}

TEST_CASE("a session with reattach goes on with the next daemon and the same device buffers") {
  TestDaemon daemon;
  TestRank rank(daemon, "engine", 0, small_spec(Attention::mha, 1), /*reattach=*/true);
  const auto hashes = prompt(9, 8);
  CHECK(write_prompt(rank, 1, hashes) == 8);
  const std::uint64_t first_epoch = rank.session().instance_epoch();
  const auto old = rank.session().nop();
  REQUIRE(old.ok());
  CHECK(rank.session().wait(*old, kPatienceMs).ok());
  for (int life = 0; life < 3; ++life) {
    daemon.kill9();
    REQUIRE(eventually([&] { return rank.session().state() == Status::daemon_lost; }));
    const std::uint64_t before = monotonic_ns();
    CHECK(rank.session().reserve(2, hashes).status() == Status::daemon_lost);
    CHECK_FALSE(rank.session().poll().has_value());
    CHECK(monotonic_ns() - before < 1000 * kMs);  // no engine thread waits for a daemon that is not there
    daemon.start();
    const std::uint64_t back_ns = monotonic_ns();
    REQUIRE(eventually([&] { return rank.session().state() == Status::ok; }));
    WARN("attached again " << (monotonic_ns() - back_ns) / kMs << " ms after the daemon was ready");
    CHECK(rank.session().instance_epoch() != first_epoch);
    CHECK(rank.session().probe(hashes).leading == 8);
    const ReadBack read = read_back(rank, 1, hashes);
    CHECK(read.hits == 8);
    CHECK(read.wrong == 0);
    CHECK(rank.session().wait(*old, 10).status() == Status::not_found);  // an old ticket fits nothing new
  }
}

TEST_CASE("a lost session with unread results is not replaced until they have been read") {
  TestDaemon daemon;
  TestRank rank(daemon, "engine", 0, small_spec(Attention::mha, 1), /*reattach=*/true);
  const auto reserved = rank.run(rank.session().reserve(1, prompt(1, 4)));
  REQUIRE(reserved.status == Status::ok);
  freeze(daemon);
  auto write = rank.session().write(reserved.lease, 0, TestRank::pages(0, 4));
  REQUIRE(write.ok());
  daemon.kill9();
  daemon.start();
  const timespec nap{0, 300'000'000};
  ::nanosleep(&nap, nullptr);
  CHECK(rank.session().state() == Status::daemon_lost);
  const auto lost = rank.session().wait(*write, kPatienceMs);
  REQUIRE(lost.ok());
  CHECK(lost->status == Status::daemon_lost);
  REQUIRE(eventually([&] {
    while (rank.session().poll()) {
    }
    return rank.session().state() == Status::ok;
  }));
}

TEST_CASE("a stopped rank keeps its leases until hicache-ctl evict-client fences it") {
  TestDaemon daemon;
  TestRank survivor(daemon, "engine", 0, small_spec(Attention::mha, 2));
  Child rank = Child::run([&] {
    TestRank second(daemon, "engine", 1, small_spec(Attention::mha, 2));
    std::puts(std::to_string(second.session().client_slot()).c_str());
    std::fflush(stdout);
    for (int i = 0; i < 3000 && second.session().state() == Status::ok; ++i) ::usleep(10'000);
    return second.session().state() == Status::daemon_lost ? 7 : 1;
  });
  const auto slot = rank.read_line();
  REQUIRE(slot.has_value());
  rank.kill(SIGSTOP);
  const auto reserved = survivor.run(survivor.session().reserve(1, prompt(1, 4)));
  REQUIRE(reserved.status == Status::ok);
  const auto write = survivor.session().write(reserved.lease, 0, TestRank::pages(0, 4));
  REQUIRE(write.ok());
  CHECK(survivor.session().wait(*write, 200).status() == Status::timed_out);  // nobody declares it dead
  const auto run = run_program({program("hicache-ctl"), daemon.name(), "evict-client", *slot});
  CHECK(run.status.exited_with(0));
  CHECK(contains(run.out, "client " + *slot + " (pid " + std::to_string(rank.pid()) + ") is cut off"));
  const auto lost = survivor.session().wait(*write, kPatienceMs);
  REQUIRE(lost.ok());
  CHECK(lost->status == Status::peer_lost);
  CHECK(dump_findings(daemon.name()) == "");
  rank.kill(SIGCONT);
  const auto status = rank.wait();
  REQUIRE(status.has_value());
  CHECK(status->exited_with(7));  // it learns that its session has ended
  CHECK(run_program({program("hicache-ctl"), daemon.name(), "evict-client", *slot}).status.exited_with(1));
}

TEST_CASE("a stopped daemon is not a dead one: operations end by their deadline and the session lives on") {
  TestDaemon daemon;
  TestRank rank(daemon, "engine", 0, small_spec(Attention::mha, 1));
  freeze(daemon);
  const auto ticket = rank.session().nop(100);
  REQUIRE(ticket.ok());
  const auto late = rank.session().wait(*ticket, kPatienceMs);
  REQUIRE(late.ok());
  CHECK(late->status == Status::timed_out);
  CHECK(rank.session().state() == Status::ok);
  daemon.child().kill(SIGCONT);
  CHECK(rank.run(rank.session().nop()).status == Status::ok);
}
