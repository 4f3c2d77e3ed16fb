// Deaths in the middle of a write of thousands of pages, which is several copies
// (CoordinatorOptions::write_block): some may have been published, some run, some wait.
#include <csignal>
#include <cstdio>
#include <thread>

#include "tests/crash/crash_rig.hpp"
#include "tests/crash/region_surgeon.hpp"
#include "tests/support/catch.hpp"

using namespace hicache;
using namespace hicache::test;

namespace {

constexpr std::uint32_t kPages = 6'000;
constexpr const char* kPool = R"({"pool": {"max_pages": 8192}})";
constexpr WriteFence kFence{0, 1};

// What a device page must hold for each page of a request that is written from it over and over.
struct Request {
  std::vector<PrefixHash> hashes = prompt(1, kPages);
  std::vector<PrefixHash> contents = prompt(2, TestRank::kDevicePages);
  std::vector<DevicePage> device;

  Request() {
    for (std::uint32_t i = 0; i < kPages; ++i) device.push_back(DevicePage{i % TestRank::kDevicePages});
  }
  void fill(TestRank& rank) const {
    for (std::uint32_t i = 0; i < TestRank::kDevicePages; ++i) rank.fill(DevicePage{i}, contents[i]);
  }
  // Wrong pages among the first `count` of a lease.
  [[nodiscard]] std::uint32_t wrong(TestRank& rank, LeaseId lease, std::uint32_t count) const {
    std::uint32_t wrong = 0;
    for (std::uint32_t first = 0; first < count; first += TestRank::kDevicePages) {
      const std::uint32_t some = std::min(TestRank::kDevicePages, count - first);
      for (std::uint32_t i = 0; i < some; ++i) rank.spoil(DevicePage{i});
      const auto loaded = rank.run(rank.session().load(lease, first, TestRank::pages(0, some)));
      if (loaded.status != Status::ok) return count;
      for (std::uint32_t i = 0; i < some; ++i) wrong += rank.holds(DevicePage{i}, contents[i]) ? 0 : 1;
    }
    return wrong;
  }
};

// Posts the whole request, says so, raises its fence when it is told to, and waits for nothing in particular.
Child writer(const std::string& socket_path, const Request& request, const NamespaceSpec& spec,
             std::uint32_t tp_rank) {
  return Child::run([socket_path, &request, spec, tp_rank]() -> int {
    TestRank rank(socket_path, "engine", tp_rank, spec);
    request.fill(rank);
    const auto reserved = rank.run(rank.session().reserve(1, request.hashes));
    if (reserved.status != Status::ok) return 1;
    const auto write = rank.session().write(reserved.lease, 0, request.device, kFence);
    if (!write) return 2;
    std::printf("posted\n");
    std::fflush(stdout);
    rank.session().raise_write_fence(kFence.index, kFence.value);
    for (;;) ::pause();
  });
}

// Every page that is ready is right, and the rest of the request can be written.
void require_whole(const TestDaemon& daemon, const Request& request, const NamespaceSpec& spec) {
  TestRank rank(daemon, "next", 0, spec);
  const auto found = rank.run(rank.session().reserve(1, request.hashes));
  REQUIRE(found.status == Status::ok);
  CHECK(request.wrong(rank, found.lease, found.hits) == 0);
  request.fill(rank);
  const auto missing = std::span(request.device).subspan(found.hits);
  if (!missing.empty()) {
    CHECK(rank.run(rank.session().write(found.lease, found.hits, missing)).written == missing.size());
  }
  CHECK(request.wrong(rank, found.lease, kPages) == 0);
  rank.run(rank.session().release(found.lease));
  CHECK(rank.session().probe(request.hashes).leading == kPages);
}

}  // namespace

TEST_CASE("a rank may be killed at any moment of a write of thousands of pages") {
  const Request request;
  const NamespaceSpec spec = small_spec(Attention::mha, 1);
  for (std::uint32_t round = 0; round < 12; ++round) {
    INFO("round " << round);
    TestDaemon daemon(kPool);
    Child rank = writer(daemon.socket_path(), request, spec, 0);
    REQUIRE(rank.read_line() == "posted");
    std::this_thread::sleep_for(std::chrono::microseconds(round * 300));
    rank.kill(SIGKILL);
    REQUIRE(rank.wait().has_value());
    CHECK(eventually([&] {
      const RegionSurgeon region(daemon.name());
      return region.counter(Counter::attached_clients) == 0 && region.counter(Counter::pinned_pages) == 0 &&
             region.counter(Counter::resident_pages) == region.ready_pages().size();
    }));
    require_whole(daemon, request, spec);
    CHECK(dump_findings(daemon.name()) == "");
  }
}

TEST_CASE(
    "a rank that dies ends a large write of its group, whose other rank hears it once and gets its pages") {
  const Request request;
  const NamespaceSpec spec = small_spec(Attention::mha, 2);
  TestDaemon daemon(kPool);
  TestRank other(daemon, "engine", 1, spec);
  request.fill(other);
  Child rank = writer(daemon.socket_path(), request, spec, 0);
  REQUIRE(rank.read_line() == "posted");
  const auto reserved = other.run(other.session().reserve(1, request.hashes));
  REQUIRE(reserved.status == Status::ok);
  // Its own fence is never raised: all its copies wait when the other one dies.
  const auto write =
      TestRank::take(other.session().write(reserved.lease, 0, request.device, WriteFence{1, 1}));
  other.run(other.session().nop());
  rank.kill(SIGKILL);
  REQUIRE(rank.wait().has_value());
  const auto ended = TestRank::take(other.session().wait(write, kPatienceMs));
  CHECK(ended.status == Status::peer_lost);
  CHECK(ended.page_status == std::vector<Status>(kPages, Status::dropped));
  if (ended.pages_busy) {
    const auto returned = TestRank::take(other.session().wait(write, kPatienceMs));
    CHECK(returned.pages_returned);
  }
  CHECK_FALSE(other.session().poll());
  other.detach();
  CHECK(eventually([&] {
    const RegionSurgeon region(daemon.name());
    return region.counter(Counter::attached_clients) == 0 && region.counter(Counter::resident_pages) == 0;
  }));
  require_whole(daemon, request, small_spec(Attention::mha, 1));
  CHECK(dump_findings(daemon.name()) == "");
}

TEST_CASE("the daemon may be killed or stopped at any moment of a write of thousands of pages") {
  const bool killed = GENERATE(true, false);
  const Request request;
  const NamespaceSpec spec = small_spec(Attention::mha, 1);
  for (std::uint32_t round = 0; round < 8; ++round) {
    INFO((killed ? "killed, round " : "stopped, round ") << round);
    TestDaemon daemon(R"({"pool": {"max_pages": 8192}, "region": {"keep_on_exit": true}})");
    Child rank = writer(daemon.socket_path(), request, spec, 0);
    REQUIRE(rank.read_line() == "posted");
    std::this_thread::sleep_for(std::chrono::microseconds(round * 400));
    if (killed) {
      daemon.kill9();
    } else {
      CHECK(daemon.stop() == 0);
    }
    rank.kill(SIGKILL);
    REQUIRE(rank.wait().has_value());
    daemon.start();
    require_whole(daemon, request, spec);
    CHECK(dump_findings(daemon.name()) == "");
  }
}

TEST_CASE(
    "a rank that asks for another range than its group in a large write gets diverged, and the write ends") {
  const Request request;
  const NamespaceSpec spec = small_spec(Attention::mha, 2);
  TestDaemon daemon(kPool);
  TestRank rank0(daemon, "engine", 0, spec);
  TestRank rank1(daemon, "engine", 1, spec);
  const auto reserved = rank0.run(rank0.session().reserve(1, request.hashes));
  REQUIRE(rank1.run(rank1.session().reserve(1, request.hashes)).lease == reserved.lease);
  const auto write = TestRank::take(rank0.session().write(reserved.lease, 0, request.device, kFence));
  rank0.run(rank0.session().nop());
  const auto short_one = std::span(request.device).first(kPages - 1);
  CHECK(rank1.run(rank1.session().write(reserved.lease, 0, short_one)).status == Status::diverged);
  const auto ended = TestRank::take(rank0.session().wait(write, kPatienceMs));
  CHECK(ended.status == Status::poisoned);
  if (ended.pages_busy) CHECK(TestRank::take(rank0.session().wait(write, kPatienceMs)).pages_returned);
  CHECK_FALSE(rank0.session().poll());
  for (TestRank* rank : {&rank0, &rank1}) rank->run(rank->session().release(reserved.lease));
  CHECK(eventually([&] { return RegionSurgeon(daemon.name()).counter(Counter::resident_pages) == 0; }));
  CHECK(dump_findings(daemon.name()) == "");
}
