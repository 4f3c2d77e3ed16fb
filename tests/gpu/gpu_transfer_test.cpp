// Bytes and fences between GPU memory and the pool.
#include <array>
#include <chrono>
#include <thread>

#include "tests/gpu/gpu_cases.hpp"

namespace hicache::test {
namespace {

constexpr std::uint32_t kPages = 96;
constexpr std::uint64_t kDelayNs = 50'000'000;

void delay(const Gpu& gpu, CUstream stream) {
  std::uint64_t nanoseconds = kDelayNs;
  std::array<void*, 1> arguments{&nanoseconds};
  must(gpu.launch(must(gpu.kernel("hicache_delay")), 1, 1, 1, stream, arguments.data()));
}

struct Shape {
  Attention attention = Attention::mha;
  std::uint32_t head_dim = 64;
  std::uint32_t page_tokens = 16;
  BufferLayout layout = BufferLayout::together;
  bool fenced = false;
};

// Writes, spoils the device's pages, loads, and looks at every byte.
void round_trip(const Gpu& gpu, const std::string& socket, const Shape& shape) {
  NamespaceSpec spec = gpu_spec(shape.attention, 5, shape.head_dim);
  spec.page_tokens = shape.page_tokens;
  auto rank = must(GpuRank::attach(gpu, socket, spec, kPages, shape.layout));
  const auto keys = bench::made_up_keys(shape.head_dim * 10 + (shape.fenced ? 1 : 0), kPages);
  const auto pages = scattered(keys);
  write_all(*rank, keys, pages);
  must(rank->memory().poison(pages));
  must(rank->memory().synchronize());
  const LeaseId lease = must(rank->reserve(keys, kPages));
  std::optional<LayerFence> fence;
  if (shape.fenced) fence = LayerFence{1, rank->next_fence()};
  const auto ticket = rank->session().load(lease, 0, places(pages), fence);
  if (shape.fenced) {
    must(ticket);
    for (std::uint32_t layer = 0; layer < 5; ++layer)
      must(rank->session().stream_wait_layer(rank->memory().stream(), *fence, layer));
  } else {
    must(rank->wait(ticket, kPages));
  }
  expect_right(*rank, pages);  // behind the waits in the same stream
  if (shape.fenced) {
    must(rank->session().load_result(*fence, kPatienceMs));
    must(rank->wait(ticket, kPages));
  }
  must(rank->release(lease));
  must(rank->clear());
}

// Every shape, in one rank process.
void all_round_trips(const Gpu& gpu, const std::string& socket) {
  for (const Attention attention : {Attention::mha, Attention::mla}) {
    for (const BufferLayout layout : {BufferLayout::together, BufferLayout::separate}) {
      // The last one has pieces of 8 bytes.
      for (const auto& size : {std::pair{64u, 16u}, std::pair{576u, 16u}, std::pair{4u, 1u}}) {
        for (const bool fenced : {false, true}) {
          try {
            round_trip(gpu, socket, {attention, size.first, size.second, layout, fenced});
          } catch (const std::exception& e) {
            throw std::runtime_error(fmt::format("attention {} layout {} head_dim {} fenced {}: {}",
                                                 static_cast<int>(attention), bench::name_of(layout),
                                                 size.first, fenced, e.what()));
          }
        }
      }
    }
  }
}

}  // namespace

TEST_CASE(
    "Pages come back right by every method, from one allocation and from one per layer, MHA and MLA, with "
    "and "
    "without fences") {
  const std::string method = GENERATE("auto", "page_major", "layer_major", "staged", "contiguous", "batched");
  INFO("transfer.method " << method);
  TestDaemon daemon(cuda_config("256MiB", "on_demand", method));
  Child child = start_rank([&](const Gpu& gpu) { all_round_trips(gpu, daemon.socket_path()); });
  require_success(child);
  if (method == "staged") CHECK(gpu_status(daemon, "staged_chunks") > 0);
  if (method != "staged" && method != "auto") CHECK(gpu_status(daemon, "staged_chunks") == 0);
  CHECK(daemon.stop() == 0);
}

TEST_CASE(
    "A write reads its pages only after the rank's stream has raised the fence behind the producing kernel") {
  TestDaemon daemon(cuda_config());
  Child child = start_rank([&](const Gpu& gpu) {
    auto rank = must(
        GpuRank::attach(gpu, daemon.socket_path(), gpu_spec(Attention::mha), kPages, BufferLayout::together));
    const auto keys = bench::made_up_keys(7, kPages);
    const auto pages = scattered(keys);
    must(rank->memory().poison(pages));
    must(rank->memory().synchronize());
    const LeaseId lease = must(rank->reserve(keys, 0));
    const WriteFence fence{3, 1};
    const auto write = rank->session().write(lease, 0, places(pages), fence);
    must(write);
    delay(gpu, rank->memory().stream());
    must(rank->memory().fill(pages, 0));
    delay(gpu, rank->memory().stream());
    must(rank->session().stream_raise_write_fence(rank->memory().stream(), fence.index, fence.value));
    must(rank->wait(write, kPages));
    must(rank->memory().poison(pages));
    must(rank->memory().synchronize());
    must(rank->wait(rank->session().load(lease, 0, places(pages)), kPages));
    expect_right(*rank, pages);
    const auto back = rank->session().stream_raise_write_fence(rank->memory().stream(), fence.index, 0);
    expect(back.status() == Status::invalid_argument, "a fence went back");
    must(rank->release(lease));
  });
  require_success(child);
  CHECK(daemon.stop() == 0);
}

TEST_CASE("A rank that never raises its write fence does not hold up another rank on the same GPU") {
  TestDaemon daemon(cuda_config());
  Child silent = start_rank([&](const Gpu& gpu) {
    auto rank = must(
        GpuRank::attach(gpu, daemon.socket_path(), gpu_spec(Attention::mha), kPages, BufferLayout::together));
    const auto keys = bench::made_up_keys(8, kPages);
    const auto pages = scattered(keys);
    const LeaseId lease = must(rank->reserve(keys, 0));
    const auto write = must(rank->session().write(lease, 0, places(pages), WriteFence{0, 1}, 4'000));
    say("posted");
    const auto result = must(rank->session().wait(write, kPatienceMs));
    expect(result.status == Status::timed_out, "a write without its fence ended otherwise than timed_out");
    must(rank->release(lease));
    expect(must(rank->session().wait(must(rank->session().nop()), kPatienceMs)).status == Status::ok, "nop");
  });
  REQUIRE(silent.read_line() == "posted");
  Child busy = start_rank([&](const Gpu& gpu) {
    auto rank = must(
        GpuRank::attach(gpu, daemon.socket_path(), gpu_spec(Attention::mha), kPages, BufferLayout::together));
    for (std::uint64_t round = 0; round < 20; ++round) {
      const auto keys = bench::made_up_keys(100 + round, kPages);
      const auto pages = scattered(keys);
      write_all(*rank, keys, pages);
      must(rank->memory().poison(pages));
      must(rank->memory().synchronize());
      const LeaseId lease = must(rank->reserve(keys, kPages));
      must(rank->wait(rank->session().load(lease, 0, places(pages)), kPages));
      expect_right(*rank, pages);
      must(rank->release(lease));
    }
  });
  require_success(busy);
  require_success(silent);
  CHECK(daemon.stop() == 0);
}

TEST_CASE("A stream can't wait for a load that was not posted, nor for a layer that is not there") {
  TestDaemon daemon(cuda_config());
  Child child = start_rank([&](const Gpu& gpu) {
    auto rank =
        must(GpuRank::attach(gpu, daemon.socket_path(), gpu_spec(Attention::mha), 4, BufferLayout::together));
    CUstream stream = rank->memory().stream();
    expect(rank->session().stream_wait_layer(stream, {0, 5}, 0).status() == Status::invalid_argument,
           "no load");
    expect(rank->session().stream_wait_layer(stream, {0, 5}, 4).status() == Status::invalid_argument,
           "layer 4");
    expect(rank->session().stream_wait_layer(stream, {kProducerSlots, 5}, 0).status() ==
               Status::invalid_argument,
           "slot");
    must(rank->memory().synchronize());
  });
  require_success(child);
}

}  // namespace hicache::test
