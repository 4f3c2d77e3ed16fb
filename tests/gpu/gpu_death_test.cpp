// Ranks and daemons that are killed while copies run.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <thread>

#include "tests/gpu/gpu_cases.hpp"

namespace hicache::test {
namespace {

// 64 KiB pieces: 2 MiB a page, 512 MiB in flight take about 10 ms.
constexpr std::uint32_t kBigPages = 256;
NamespaceSpec big_spec() {
  NamespaceSpec spec = gpu_spec(Attention::mha, 16, 2048);
  return spec;
}

// How often a case is repeated: $NAME, or the default.
int rounds(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

std::uint64_t free_gpu_bytes() {
  Child child = start_rank([](const Gpu& gpu) { say(std::to_string(must(gpu.free_bytes()))); });
  const auto line = child.read_line();
  require_success(child);
  return std::stoull(line.value_or("0"));
}

// Writes and loads for ever.
void churn(const Gpu& gpu, const std::string& socket, std::uint64_t id, BufferLayout layout) {
  auto rank = must(GpuRank::attach(gpu, socket, big_spec(), kBigPages, layout));
  const auto keys = bench::made_up_keys(id, kBigPages);
  const auto pages = scattered(keys);
  const auto where = places(pages);
  must(rank->memory().fill(pages, 0));
  must(rank->memory().synchronize());
  say("ready");
  for (;;) {
    const LeaseId lease = must(rank->reserve(keys, 0));
    must(rank->wait(rank->session().write(lease, 0, where), kBigPages));
    for (int i = 0; i < 3; ++i) must(rank->wait(rank->session().load(lease, 0, where), kBigPages));
    must(rank->release(lease));
    must(rank->clear());
  }
}

}  // namespace

TEST_CASE(
    "AC-36 ranks killed in mid copy: the others go on with right bytes and the GPU's memory comes back") {
  const std::string method = GENERATE("auto", "staged");
  INFO("transfer.method " << method);
  TestDaemon daemon(cuda_config("2GiB", "at_start", method));
  await_pinned(daemon);
  const int kills = rounds("HICACHE_GPU_RANK_KILLS", 10);
  // A first rank makes the daemon's context, which stays.
  Child first = start_rank([&](const Gpu& gpu) {
    auto rank =
        must(GpuRank::attach(gpu, daemon.socket_path(), gpu_spec(Attention::mha), 8, BufferLayout::together));
    const auto keys = bench::made_up_keys(1, 8);
    write_all(*rank, keys, scattered(keys));
  });
  require_success(first);
  const std::uint64_t before = free_gpu_bytes();

  Child survivor = start_rank([&](const Gpu& gpu) {
    auto rank = must(
        GpuRank::attach(gpu, daemon.socket_path(), gpu_spec(Attention::mla), 64, BufferLayout::separate));
    say("ready");
    std::uint64_t round = 0;
    while (::access((daemon.socket_path() + ".stop").c_str(), F_OK) != 0) {
      const auto keys = bench::made_up_keys(1'000'000 + ++round, 64);
      const auto pages = scattered(keys);
      write_all(*rank, keys, pages);
      must(rank->memory().poison(pages));
      must(rank->memory().synchronize());
      const auto reserved = must(rank->reserve_any(keys));
      // The churning rank clears the pool: some pages may be gone, none may be wrong.
      if (reserved.hits > 0) {
        const std::vector<KeyedPage> there(pages.begin(), pages.begin() + reserved.hits);
        must(rank->wait(rank->session().load(reserved.lease, 0, places(there)), reserved.hits));
        expect_right(*rank, there);
      }
      must(rank->release(reserved.lease));
    }
    say(std::to_string(round));
  });
  REQUIRE(survivor.read_line() == "ready");
  for (int i = 0; i < kills; ++i) {
    Child victim = start_rank([&](const Gpu& gpu) {
      churn(gpu, daemon.socket_path(), 10 + i, i % 2 == 0 ? BufferLayout::together : BufferLayout::separate);
    });
    const auto line = victim.read_line();
    INFO(victim.error_text());
    REQUIRE(line == "ready");
    std::this_thread::sleep_for(std::chrono::milliseconds(5 + 7 * (i % 10)));
    victim.kill(SIGKILL);
    REQUIRE(victim.wait().has_value());
  }
  write_text(daemon.socket_path() + ".stop", "");
  const auto rounds_done = survivor.read_line();
  require_success(survivor);
  CHECK(std::stoull(rounds_done.value_or("0")) > 0);
  // The victims' memory is back once the daemon has closed their handles.
  constexpr std::uint64_t kTolerance = 64 * kMiB;
  std::uint64_t after = 0;
  CHECK(eventually([&] {
    after = free_gpu_bytes();
    return after + kTolerance >= before;
  }));
  INFO("free before " << before << " after " << after);
  CHECK(daemon.stop() == 0);
}

TEST_CASE(
    "AC-38 AC-39 AC-41 a daemon killed in mid load releases the stream, the load counts as failed, and pages "
    "are "
    "free only once no copy can land") {
  const int kills = rounds("HICACHE_GPU_DAEMON_KILLS", 3);
  for (int i = 0; i < kills; ++i) {
    const std::string method = i % 2 == 0 ? "auto" : "staged";
    INFO("transfer.method " << method);
    TestDaemon daemon(cuda_config("1GiB", "at_start", method));
    await_pinned(daemon);
    Child child = start_rank([&](const Gpu& gpu) {
      auto rank =
          must(GpuRank::attach(gpu, daemon.socket_path(), big_spec(), kBigPages, BufferLayout::together));
      const auto keys = bench::made_up_keys(5, kBigPages);
      const auto pages = scattered(keys);
      write_all(*rank, keys, pages);
      const LeaseId lease = must(rank->reserve(keys, kBigPages));
      Session& session = rank->session();
      // Loads until the daemon dies: one is caught in the middle.
      for (;;) {
        const LayerFence fence{0, rank->next_fence()};
        const auto ticket = session.load(lease, 0, places(pages), fence, 20'000);
        if (ticket.status() == Status::daemon_lost) break;  // it died between two loads
        must(ticket);
        const Outcome waiting = session.stream_wait_layer(rank->memory().stream(), fence, 15);
        expect(waiting || waiting.status() == Status::daemon_lost, "the wait was refused");
        if (fence.value == 2) say("loading");
        // Nobody calls the session meanwhile: its own thread must release the stream.
        must(rank->memory().synchronize());
        const Outcome loaded = session.load_result(fence, kPatienceMs);
        auto result = must(session.wait(*ticket, kPatienceMs));
        if (result.status == Status::ok) {
          must(loaded);
          continue;
        }
        // The bytes may have landed without the daemon having said so.
        expect(loaded || loaded.status() == Status::daemon_lost,
               fmt::format("load_result says {}", to_string(loaded.status())));
        expect(result.status == Status::daemon_lost, "the operation ended otherwise than daemon_lost");
        if (result.pages_busy) {
          result = must(session.wait(*ticket, kPatienceMs));
          expect(result.pages_returned, "pages were not returned");
        }
        break;
      }
      // From now on the pages are the rank's: nothing may land in them any more.
      const auto other_keys = bench::made_up_keys(6, kBigPages);
      const auto other = scattered(other_keys);
      must(rank->memory().fill(other, 0));
      must(rank->memory().synchronize());
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      expect_right(*rank, other);
    });
    const auto line = child.read_line();
    INFO(child.error_text());
    REQUIRE(line == "loading");
    std::this_thread::sleep_for(std::chrono::milliseconds(3 + 4 * i));
    daemon.kill9();
    require_success(child);
  }
}

}  // namespace hicache::test
