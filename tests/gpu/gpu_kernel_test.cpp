// io_backend kernel on a GPU: the rank's own kernels gather and scatter pages of the pool that it maps.
#include <unistd.h>

#include <csignal>

#include "tests/gpu/gpu_cases.hpp"

namespace hicache::test {
namespace {

constexpr std::uint32_t kPages = 96;

std::string kernel_config(const std::string& pool = "256MiB", std::uint32_t block_quota = 2) {
  return R"({"pool": {"bytes": ")" + pool + R"(", "segment_bytes": "4MiB", "map_engines": ["engine"]}, )" +
         R"("transfer": {"block_quota": )" + std::to_string(block_quota) + "}}";
}

std::unique_ptr<GpuRank> kernel_rank(const Gpu& gpu, const std::string& socket, const NamespaceSpec& spec,
                                     std::uint32_t pages, BufferLayout layout, std::uint32_t tp_rank = 0) {
  return must(GpuRank::attach(gpu, socket, spec, pages, layout, {"engine", tp_rank}, 0, IoBackend::kernel));
}

// Writes, spoils the device's pages, loads with every layer's fence waited for in the stream, and looks at
// every byte behind the waits.
void round_trip(const Gpu& gpu, const std::string& socket, const NamespaceSpec& spec, BufferLayout layout,
                std::uint64_t id) {
  auto rank = kernel_rank(gpu, socket, spec, kPages, layout);
  const auto keys = bench::made_up_keys(id, kPages);
  const auto pages = scattered(keys);
  write_all(*rank, keys, pages);
  must(rank->memory().poison(pages));
  must(rank->memory().synchronize());
  const LeaseId lease = must(rank->reserve(keys, kPages));
  const LayerFence fence{1, rank->next_fence()};
  const auto ticket = rank->session().load(lease, 0, places(pages), fence);
  must(ticket);
  for (std::uint32_t layer = 0; layer < spec.layers; ++layer)
    must(rank->session().stream_wait_layer(rank->memory().stream(), fence, layer));
  expect_right(*rank, pages);
  must(rank->session().load_result(fence, kPatienceMs));
  must(rank->wait(ticket, kPages));
  must(rank->release(lease));
  must(rank->clear());
}

}  // namespace

TEST_CASE("io_backend kernel: every byte is right, MHA and MLA, any layout, piece and block quota") {
  const std::uint32_t quota = GENERATE(1u, 2u, 16u);
  TestDaemon daemon(kernel_config("256MiB", quota));
  Child child = start_rank([&](const Gpu& gpu) {
    std::uint64_t id = 0;
    for (const Attention attention : {Attention::mha, Attention::mla}) {
      for (const BufferLayout layout : {BufferLayout::together, BufferLayout::separate}) {
        // The last one has pieces of 8 bytes.
        for (const auto& size : {std::pair{64u, 16u}, std::pair{576u, 16u}, std::pair{4u, 1u}}) {
          NamespaceSpec spec = gpu_spec(attention, 5, size.first);
          spec.page_tokens = size.second;
          round_trip(gpu, daemon.socket_path(), spec, layout, ++id);
        }
      }
    }
  });
  require_success(child);
  CHECK(daemon.stop() == 0);
}

TEST_CASE("io_backend kernel: a write and a load at once, larger than a launch of one block can hurry") {
  TestDaemon daemon(kernel_config("512MiB"));
  Child child = start_rank([&](const Gpu& gpu) {
    const NamespaceSpec spec = gpu_spec(Attention::mha, 16, 512);
    auto rank = kernel_rank(gpu, daemon.socket_path(), spec, 2 * kPages, BufferLayout::separate);
    const auto old_keys = bench::made_up_keys(1, kPages);
    const auto old_pages = scattered(old_keys);
    write_all(*rank, old_keys, old_pages);
    const auto new_keys = bench::made_up_keys(2, kPages);
    auto new_pages = scattered(new_keys);
    for (KeyedPage& page : new_pages) page.page.value += kPages;
    must(rank->memory().fill(new_pages, 0));
    must(rank->memory().poison(old_pages));
    must(rank->memory().synchronize());
    const LeaseId reading = must(rank->reserve(old_keys, kPages));
    const LeaseId writing = must(rank->reserve(new_keys, 0));
    const auto load = rank->session().load(reading, 0, places(old_pages));
    const auto write = rank->session().write(writing, 0, places(new_pages));
    must(rank->wait(load, kPages));
    must(rank->wait(write, kPages));
    expect_right(*rank, old_pages);
    must(rank->release(reading));
    must(rank->release(writing));
    must(rank->memory().poison(new_pages));
    must(rank->memory().synchronize());
    const LeaseId again = must(rank->reserve(new_keys, kPages));
    must(rank->wait(rank->session().load(again, 0, places(new_pages)), kPages));
    expect_right(*rank, new_pages);
    must(rank->release(again));
  });
  require_success(child);
  CHECK(daemon.stop() == 0);
}

TEST_CASE(
    "io_backend kernel: ranks killed in mid copy leave no page leased once they are gone, and no wrong "
    "byte") {
  TestDaemon daemon(kernel_config("1GiB"));
  const NamespaceSpec spec = gpu_spec(Attention::mha, 16, 2048);
  for (std::uint64_t round = 0; round < 5; ++round) {
    Child victim = start_rank([&](const Gpu& gpu) {
      auto rank = kernel_rank(gpu, daemon.socket_path(), spec, 128, BufferLayout::together);
      const auto keys = bench::made_up_keys(100 + round, 128);
      const auto pages = scattered(keys);
      must(rank->memory().fill(pages, 0));
      must(rank->memory().synchronize());
      say("ready");
      for (;;) {
        const LeaseId lease = must(rank->reserve(keys, 0));
        must(rank->wait(rank->session().write(lease, 0, places(pages)), 128));
        must(rank->wait(rank->session().load(lease, 0, places(pages)), 128));
        must(rank->release(lease));
        must(rank->clear());
      }
    });
    REQUIRE(victim.read_line() == "ready");
    ::usleep(static_cast<useconds_t>(3'000 + 4'000 * round));
    victim.kill(SIGKILL);
    victim.wait();
    Child reader = start_rank([&](const Gpu& gpu) {
      auto rank = kernel_rank(gpu, daemon.socket_path(), spec, 128, BufferLayout::together);
      const auto keys = bench::made_up_keys(100 + round, 128);
      const auto reserved = must(rank->reserve_any(keys));
      auto pages = scattered(keys);
      pages.resize(reserved.hits);
      if (reserved.hits > 0) {
        must(rank->memory().poison(pages));
        must(rank->memory().synchronize());
        must(rank->wait(rank->session().load(reserved.lease, 0, places(pages)), reserved.hits));
        expect_right(*rank, pages);
      }
      must(rank->release(reserved.lease));
    });
    require_success(reader);
    const auto check = run_program({program("hicache-dump"), daemon.name(), "--check"});
    INFO(check.out + check.err);
    CHECK(check.status.exited_with(0));
  }
  CHECK(daemon.stop() == 0);
}

}  // namespace hicache::test
