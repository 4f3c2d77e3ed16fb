// Transfers through a rank's staging memory: what must hold when the rank is slow, silent, gone, or offers
// none.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "shm/clock.hpp"
#include "shm/staging_layout.hpp"
#include "tests/gpu/gpu_cases.hpp"

namespace hicache::test {
namespace {

constexpr std::uint32_t kPages = 96;

// 32 KiB a page and layer pair: many chunks where slots are small.
NamespaceSpec wide_spec() {
  return gpu_spec(Attention::mha, 16, 512);
}

constexpr std::uint64_t kSmallSlots = kStagingSlots * 128 * kKiB;

void load_and_check(GpuRank& rank, const std::vector<PrefixHash>& keys, const std::vector<KeyedPage>& pages) {
  const auto count = static_cast<std::uint32_t>(pages.size());
  must(rank.memory().poison(pages));
  must(rank.memory().synchronize());
  const LeaseId lease = must(rank.reserve(keys, count));
  must(rank.wait(rank.session().load(lease, 0, places(pages)), count));
  expect_right(rank, pages);
  must(rank.release(lease));
}

}  // namespace

TEST_CASE("Far more chunks than slots, both directions at once, keep every byte") {
  TestDaemon daemon(cuda_config("256MiB", "on_demand", "staged"));
  Child child = start_rank([&](const Gpu& gpu) {
    auto rank = must(GpuRank::attach(gpu, daemon.socket_path(), wide_spec(), 2 * kPages,
                                     BufferLayout::separate, {}, kSmallSlots));
    const auto old_keys = bench::made_up_keys(1, kPages);
    const auto old_pages = scattered(old_keys);
    write_all(*rank, old_keys, old_pages);
    // New pages lie behind the old ones on the device.
    const auto new_keys = bench::made_up_keys(2, kPages);
    auto new_pages = scattered(new_keys);
    for (KeyedPage& page : new_pages) page.page.value += kPages;
    must(rank->memory().fill(new_pages, 0));
    must(rank->memory().poison(old_pages));
    must(rank->memory().synchronize());
    const LeaseId reading = must(rank->reserve(old_keys, kPages));
    const LeaseId writing = must(rank->reserve(new_keys, 0));
    const auto load = rank->session().load(reading, 0, places(old_pages), LayerFence{0, rank->next_fence()});
    const auto write = rank->session().write(writing, 0, places(new_pages));
    must(rank->wait(load, kPages));
    must(rank->wait(write, kPages));
    must(rank->release(reading));
    must(rank->release(writing));
    expect_right(*rank, old_pages);
    load_and_check(*rank, new_keys, new_pages);
  });
  require_success(child);
  CHECK(gpu_status(daemon, "staged_chunks") > 4 * kStagingSlots);
  CHECK(daemon.stop() == 0);
}

TEST_CASE("A rank without staging memory is served with pitched copies whatever the configuration says") {
  TestDaemon daemon(cuda_config("256MiB", "on_demand", "staged"));
  Child child = start_rank([&](const Gpu& gpu) {
    auto rank =
        must(GpuRank::attach(gpu, daemon.socket_path(), wide_spec(), kPages, BufferLayout::together, {}, 0));
    const auto keys = bench::made_up_keys(3, kPages);
    const auto pages = scattered(keys);
    write_all(*rank, keys, pages);
    load_and_check(*rank, keys, pages);
  });
  require_success(child);
  CHECK(gpu_status(daemon, "staged_chunks") == 0);
  CHECK(daemon.stop() == 0);
}

TEST_CASE("A stopped rank holds up neither another rank nor its own pages, and goes on where it was") {
  TestDaemon daemon(cuda_config("512MiB", "at_start", "staged"));
  await_pinned(daemon);
  Child stopped = start_rank([&](const Gpu& gpu) {
    auto rank = must(GpuRank::attach(gpu, daemon.socket_path(), wide_spec(), kPages, BufferLayout::together,
                                     {}, kSmallSlots));
    const auto keys = bench::made_up_keys(4, kPages);
    const auto pages = scattered(keys);
    write_all(*rank, keys, pages);
    for (std::uint32_t round = 0;; ++round) {
      if (round == 2) say("working");
      load_and_check(*rank, keys, pages);
      if (::access((daemon.socket_path() + ".enough").c_str(), F_OK) == 0) return;
    }
  });
  REQUIRE(stopped.read_line() == "working");
  ::kill(stopped.pid(), SIGSTOP);
  Child busy = start_rank([&](const Gpu& gpu) {
    auto rank = must(GpuRank::attach(gpu, daemon.socket_path(), wide_spec(), kPages, BufferLayout::separate));
    for (std::uint64_t round = 0; round < 10; ++round) {
      const auto keys = bench::made_up_keys(100 + round, kPages);
      const auto pages = scattered(keys);
      write_all(*rank, keys, pages);
      load_and_check(*rank, keys, pages);
    }
  });
  require_success(busy);
  write_text(daemon.socket_path() + ".enough", "");
  ::kill(stopped.pid(), SIGCONT);
  require_success(stopped);
  CHECK(daemon.stop() == 0);
}

TEST_CASE("A daemon stops although a rank with a chunk in work is stopped") {
  TestDaemon daemon(cuda_config("512MiB", "at_start", "staged"));
  await_pinned(daemon);
  Child rank_process = start_rank([&](const Gpu& gpu) {
    auto rank = must(GpuRank::attach(gpu, daemon.socket_path(), wide_spec(), kPages, BufferLayout::together,
                                     {}, kSmallSlots));
    const auto keys = bench::made_up_keys(5, kPages);
    const auto pages = scattered(keys);
    write_all(*rank, keys, pages);
    const LeaseId lease = must(rank->reserve(keys, kPages));
    say("working");
    for (;;) must(rank->wait(rank->session().load(lease, 0, places(pages)), kPages));
  });
  REQUIRE(rank_process.read_line() == "working");
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  ::kill(rank_process.pid(), SIGSTOP);
  CHECK(daemon.stop() == 0);
  rank_process.kill(SIGKILL);
  ::kill(rank_process.pid(), SIGCONT);
  REQUIRE(rank_process.wait().has_value());
}

TEST_CASE("A session that was closed gives its staging memory back, also after the daemon was killed") {
  TestDaemon daemon(cuda_config("256MiB", "at_start", "staged"));
  await_pinned(daemon);
  // In one process: its context stays, and what is free after each session is comparable.
  Child child = start_rank([&](const Gpu& gpu) {
    constexpr std::uint64_t kTolerance = 16 * kMiB;
    const auto one_session = [&](bool kill) {
      auto rank =
          must(GpuRank::attach(gpu, daemon.socket_path(), wide_spec(), kPages, BufferLayout::together));
      const auto keys = bench::made_up_keys(monotonic_ns(), kPages);
      const auto pages = scattered(keys);
      write_all(*rank, keys, pages);
      load_and_check(*rank, keys, pages);
      if (!kill) return;
      say("kill");
      while (rank->session().state() == Status::ok) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    one_session(false);
    const std::uint64_t before = must(gpu.free_bytes());
    for (int i = 0; i < 3; ++i) one_session(false);
    const std::uint64_t after = must(gpu.free_bytes());
    expect(after + kTolerance >= before, fmt::format("{} bytes free before, {} after", before, after));
    one_session(true);
    const std::uint64_t last = must(gpu.free_bytes());
    expect(last + kTolerance >= before, fmt::format("{} bytes free before, {} after a kill", before, last));
  });
  REQUIRE(child.read_line() == "kill");
  daemon.kill9();
  require_success(child);
}

TEST_CASE("The pattern's page lists reach the GPU whole: what fill wrote is what the host reads back") {
  TestDaemon daemon(cuda_config("64MiB", "at_start"));
  Child child = start_rank([&](const Gpu& gpu) {
    // As many pages as a transfer of 1 GiB has at one token a page.
    constexpr std::uint32_t kMany = 26'000;
    NamespaceSpec spec = gpu_spec(Attention::mla, 1, 16);
    auto memory = must(bench::GpuPages::create(gpu, spec, kMany, BufferLayout::together));
    for (std::uint64_t round = 0; round < 20; ++round) {
      const auto keys = bench::made_up_keys(round, kMany);
      const auto pages = scattered(keys);
      must(memory->fill(pages, 0));
      const std::uint64_t wrong = must(memory->count_wrong_on_host(pages, 0));
      expect(wrong == 0, fmt::format("round {}: {} pages hold another page's pattern", round, wrong));
    }
  });
  require_success(child);
}

}  // namespace hicache::test
