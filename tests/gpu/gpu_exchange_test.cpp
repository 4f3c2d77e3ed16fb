// Several GPUs: ranks found by UUID, and pages of a group that come over one GPU's link and go on to the
// others.
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <thread>

#include "libhicache/include/hicache/cuda.hpp"
#include "shm/clock.hpp"
#include "tests/gpu/gpu_cases.hpp"
#include "tools/bench/gpu/gpu_group.hpp"
#include "tools/bench/pattern_math.hpp"
#include "tools/bench/shared_object.hpp"
#include "tools/bench/visible_gpu.hpp"

namespace hicache::test {
namespace {

using bench::GroupBoard;
using bench::GroupMember;
using bench::GroupPlace;
using Json = nlohmann::json;

constexpr std::uint32_t kPages = 96;

std::uint32_t gpu_count() {
  Child child = Child::run([] {
    const auto driver = bench::load_driver();
    int count = 0;
    if (driver) (*driver)->cuDeviceGetCount(&count);
    say(std::to_string(count));
    return 0;
  });
  const auto line = child.read_line();
  require_success(child);
  return static_cast<std::uint32_t>(std::stoul(line.value_or("0")));
}

// Says why, when there are too few GPUs.
bool two_gpus() {
  static const std::uint32_t count = gpu_count();
  if (count < 2) WARN("SKIPPED: this case needs two GPUs, the driver shows " << count);
  return count >= 2;
}

std::string exchange_config(const std::string& pool, std::uint32_t wait_us) {
  Json config = Json::parse(cuda_config(pool, "at_start"));
  config["mla"] = {{"load", "exchange"}, {"wait_us", wait_us}};
  return config.dump();
}

Json cuda_status(const TestDaemon& daemon) {
  return Json::parse(must(control(daemon.socket_path(), {"status"}))).at("cuda");
}

NamespaceSpec group_spec(std::uint32_t ranks, std::uint32_t layers = 5, std::uint32_t head_dim = 576) {
  NamespaceSpec spec = gpu_spec(Attention::mla, layers, head_dim);
  spec.tp_size = ranks;
  return spec;
}

// Runs a rank that sees only one GPU.
Child start_rank_on(std::uint32_t gpu, const std::function<void(const Gpu&)>& body) {
  return Child::run([gpu, body] {
    try {
      bench::see_only_gpu(gpu);
      body(*must(Gpu::open()));
      return 0;
    } catch (const std::exception& e) {
      std::fprintf(stderr, "%s\n", e.what());
      return 1;
    }
  });
}

// Runs ranks r on GPU r % 2 and waits for all.
void run_group(std::uint32_t ranks, const std::function<void(GroupMember&, const Gpu&)>& body) {
  auto board = must(bench::SharedObject<GroupBoard>::create());
  std::vector<Child> children;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    children.push_back(start_rank_on(rank % 2, [&, rank](const Gpu& gpu) {
      GroupMember member(*board, rank, ranks);
      try {
        body(member, gpu);
      } catch (...) {
        board->abort.store(1);
        throw;
      }
    }));
  }
  for (Child& child : children) require_success(child);
}

// Loads pages over spoiled ones, the stream behind the layers when `fenced`, and looks at every byte.
void load_and_check(GpuRank& rank, LeaseId lease, const std::vector<KeyedPage>& pages, std::uint32_t layers,
                    bool fenced) {
  must(rank.memory().poison(pages));
  must(rank.memory().synchronize());
  std::optional<LayerFence> fence;
  if (fenced) fence = LayerFence{1, rank.next_fence()};
  const auto ticket = rank.session().load(lease, 0, places(pages), fence);
  if (fenced) {
    must(ticket);
    for (std::uint32_t layer = 0; layer < layers; ++layer)
      must(rank.session().stream_wait_layer(rank.memory().stream(), *fence, layer));
  } else {
    must(rank.wait(ticket, static_cast<std::uint32_t>(pages.size())));
  }
  expect_right(rank, pages);  // behind the waits in the same stream
  if (!fenced) return;
  must(rank.session().load_result(*fence, kPatienceMs));
  must(rank.wait(ticket, static_cast<std::uint32_t>(pages.size())));
}

void exchange_round_trip(const std::string& socket, std::uint32_t ranks, BufferLayout layout, bool fenced,
                         std::uint64_t id) {
  run_group(ranks, [&](GroupMember& member, const Gpu& gpu) {
    const NamespaceSpec spec = group_spec(ranks);
    auto rank = must(GpuRank::attach(gpu, socket, spec, kPages, layout,
                                     GroupPlace{fmt::format("exchange-{}", id), member.rank()}));
    must(member.meet());
    const auto keys = bench::made_up_keys(id, kPages);
    const auto pages = scattered(keys);
    write_all(*rank, keys, pages);
    must(member.meet());
    const LeaseId lease = must(rank->reserve(keys, kPages));
    for (int i = 0; i < 3; ++i) {
      must(member.meet());
      load_and_check(*rank, lease, pages, spec.layers, fenced);
    }
    must(rank->release(lease));
    must(member.on_first([&] { return rank->clear(); }));
  });
}

}  // namespace

TEST_CASE("A rank's GPU is found by its UUID whatever the rank's process calls it", "[gpus]") {
  if (!two_gpus()) return;
  TestDaemon daemon(cuda_config());
  Child child = start_rank_on(1, [&](const Gpu& gpu) {
    auto rank = must(
        GpuRank::attach(gpu, daemon.socket_path(), gpu_spec(Attention::mha), kPages, BufferLayout::together));
    const auto keys = bench::made_up_keys(1, kPages);
    const auto pages = scattered(keys);
    write_all(*rank, keys, pages);
    const LeaseId lease = must(rank->reserve(keys, kPages));
    load_and_check(*rank, lease, pages, 4, false);
  });
  require_success(child);
  const Json gpus = cuda_status(daemon).at("gpus");
  CHECK(gpus.at(0).at("transfers") == 0);
  CHECK(gpus.at(0).at("state") == "idle");
  CHECK(gpus.at(1).at("transfers") == 2);
  CHECK(daemon.stop() == 0);
}

TEST_CASE("MHA ranks on two GPUs: a page is complete when both shards are, and each rank's bytes are right",
          "[gpus]") {
  if (!two_gpus()) return;
  TestDaemon daemon(cuda_config());
  run_group(2, [&](GroupMember& member, const Gpu& gpu) {
    NamespaceSpec spec = gpu_spec(Attention::mha);
    spec.tp_size = 2;
    auto rank = must(GpuRank::attach(gpu, daemon.socket_path(), spec, kPages, BufferLayout::together,
                                     GroupPlace{"mha", member.rank()}));
    must(member.meet());
    const auto keys = bench::made_up_keys(1, kPages);
    const auto pages = scattered(keys);
    must(rank->memory().fill(pages, member.rank()));
    must(rank->memory().synchronize());
    const LeaseId first = must(rank->reserve(keys, 0));
    must(rank->wait(rank->session().write(first, 0, places(pages)), kPages));
    must(rank->release(first));
    must(member.meet());
    must(rank->memory().poison(pages));
    must(rank->memory().synchronize());
    const LeaseId lease = must(rank->reserve(keys, kPages));
    must(rank->wait(rank->session().load(lease, 0, places(pages)), kPages));
    const auto found = must(rank->memory().verify(pages, member.rank()));
    expect(found.words > 0 && found.wrong == 0, "a shard's bytes are wrong: " + found.first);
    must(rank->release(lease));
    must(member.meet());
  });
  CHECK(daemon.stop() == 0);
}

TEST_CASE("Exchanged pages are right on all ranks, for every layout, with and without layer fences",
          "[gpus]") {
  if (!two_gpus()) return;
  TestDaemon daemon(exchange_config("256MiB", 1'000'000));
  await_pinned(daemon);
  std::uint64_t id = 0;
  for (const std::uint32_t ranks : {2u, 4u}) {
    for (const BufferLayout layout : {BufferLayout::together, BufferLayout::separate, BufferLayout::blocks}) {
      for (const bool fenced : {false, true}) {
        INFO("ranks " << ranks << " layout " << bench::name_of(layout) << " fenced " << fenced);
        exchange_round_trip(daemon.socket_path(), ranks, layout, fenced, ++id);
      }
    }
  }
  const Json status = cuda_status(daemon);
  INFO(status.dump());
  CHECK(status.at("mla").at("exchanged") == 3 * id);
  CHECK(status.at("mla").at("failed") == 0);
  CHECK(status.at("gpus").at(0).at("bytes_passed") > 0);
  CHECK(status.at("gpus").at(1).at("bytes_passed") > 0);
  CHECK(daemon.stop() == 0);
}

TEST_CASE("By itself the daemon exchanges what is worth it, on several streams as well", "[gpus]") {
  if (!two_gpus()) return;
  Json config = Json::parse(cuda_config("1GiB", "at_start"));
  config["mla"] = {{"wait_us", 1'000'000}};
  config["transfer"]["streams"] = 3;
  TestDaemon daemon(config.dump());
  await_pinned(daemon);
  // 1 MiB a page: 64 pages gain half a millisecond, one gains nothing.
  run_group(2, [&](GroupMember& member, const Gpu& gpu) {
    const NamespaceSpec spec = group_spec(2, 16, 2048);
    auto rank = must(GpuRank::attach(gpu, daemon.socket_path(), spec, 64, BufferLayout::together,
                                     GroupPlace{"auto", member.rank()}));
    must(member.meet());
    const auto keys = bench::made_up_keys(3, 64);
    const auto pages = scattered(keys);
    write_all(*rank, keys, pages);
    must(member.meet());
    const LeaseId lease = must(rank->reserve(keys, 64));
    must(member.meet());
    load_and_check(*rank, lease, pages, spec.layers, true);
    must(member.meet());
    load_and_check(*rank, lease, {pages.begin(), pages.begin() + 1}, spec.layers, true);
    must(rank->release(lease));
    must(member.meet());
  });
  const Json mla = cuda_status(daemon).at("mla");
  INFO(mla.dump());
  CHECK(mla.at("load") == "auto");
  // How long ranks wait for each other is bounded by the gain: on a loaded machine one may come too late.
  CHECK(mla.at("exchanged").get<int>() + mla.at("direct").at("late").get<int>() == 1);
  CHECK(daemon.stop() == 0);
}

TEST_CASE("Exchanged pages are right in memory that travels as a file descriptor", "[gpus]") {
  if (!two_gpus()) return;
  TestDaemon daemon(exchange_config("256MiB", 1'000'000));
  await_pinned(daemon);
  run_group(2, [&](GroupMember& member, const Gpu& gpu) {
    const bench::Driver& d = gpu.driver();
    std::size_t bytes = 4 * kMiB;
    const CUdeviceptr start =
        create_mapped(gpu, bytes, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) + kMiB;  // inside of it
    NamespaceSpec spec = gpu_spec(Attention::mla, 1);
    spec.tp_size = 2;
    const std::uint64_t piece = spec.piece_bytes();
    const auto count = static_cast<std::uint32_t>(kMiB / piece);
    AttachOptions options;
    options.socket_path = daemon.socket_path();
    options.engine = "descriptors";
    options.tp_rank = member.rank();
    options.spec = spec;
    auto session = must(Session::attach(options));
    const std::vector<CudaRange> ranges{{pointer_of(start), kMiB}};
    const std::vector<DeviceTensor> tensors{{0, 0, TensorKind::latent, 0, piece, piece}};
    must(register_cuda_buffers(*session, ranges, tensors, count));
    must(member.meet());
    std::vector<std::uint64_t> words(kMiB / 8);
    for (std::size_t i = 0; i < words.size(); ++i) words[i] = bench::pattern_word(1, i);
    cuda(gpu, d.cuMemcpyHtoD(start, words.data(), kMiB), "filling");
    cuda(gpu, d.cuStreamSynchronize(nullptr), "filling");  // the copy may return before its end
    const auto keys = bench::made_up_keys(1, count);
    std::vector<DevicePage> pages;
    for (std::uint32_t i = 0; i < count; ++i) pages.push_back(DevicePage{i});
    const auto lease = must(session->wait(must(session->reserve(1, keys)), kPatienceMs)).lease;
    const auto written = must(session->wait(must(session->write(lease, 0, pages)), kPatienceMs));
    expect(written.status == Status::ok && written.written == count, "the write did not keep every page");
    must(member.meet());
    std::vector<std::uint64_t> back(words.size());
    cuda(gpu, d.cuMemsetD8(start, 0xa5, kMiB), "spoiling");
    cuda(gpu, d.cuMemcpyDtoH(back.data(), start, kMiB), "reading");  // the memset is over
    must(member.meet());
    const auto loaded = must(session->wait(must(session->load(lease, 0, pages)), kPatienceMs));
    expect(loaded.status == Status::ok, "the load failed");
    cuda(gpu, d.cuMemcpyDtoH(back.data(), start, kMiB), "reading");
    expect(back == words, "the bytes that came back differ");
    must(member.meet());
  });
  const Json mla = cuda_status(daemon).at("mla");
  INFO(mla.dump());
  CHECK(mla.at("exchanged") == 1);
  CHECK(daemon.stop() == 0);
}

TEST_CASE("A rank on one GPU that never raises its write fence does not hold up a rank on another",
          "[gpus]") {
  if (!two_gpus()) return;
  TestDaemon daemon(cuda_config());
  run_group(2, [&](GroupMember& member, const Gpu& gpu) {
    auto rank = must(
        GpuRank::attach(gpu, daemon.socket_path(), gpu_spec(Attention::mha), kPages, BufferLayout::together));
    const auto keys = bench::made_up_keys(40 + member.rank(), kPages);
    const auto pages = scattered(keys);
    if (member.first()) {
      const LeaseId lease = must(rank->reserve(keys, 0));
      const auto write = must(rank->session().write(lease, 0, places(pages), WriteFence{0, 1}, 20'000));
      must(member.meet());  // posted
      must(member.meet());  // the other one has written and loaded
      rank->session().raise_write_fence(0, 1);
      must(rank->wait(write, kPages));
      must(rank->release(lease));
    } else {
      must(member.meet());
      write_all(*rank, keys, pages);
      const LeaseId lease = must(rank->reserve(keys, kPages));
      load_and_check(*rank, lease, pages, 4, false);
      must(rank->release(lease));
      must(member.meet());
    }
  });
  CHECK(daemon.stop() == 0);
}

TEST_CASE("A rank that posts its load late gets it, and the others have loaded directly by then", "[gpus]") {
  if (!two_gpus()) return;
  TestDaemon daemon(exchange_config("256MiB", 20'000));
  await_pinned(daemon);
  run_group(2, [&](GroupMember& member, const Gpu& gpu) {
    const NamespaceSpec spec = group_spec(2);
    auto rank = must(GpuRank::attach(gpu, daemon.socket_path(), spec, kPages, BufferLayout::together,
                                     GroupPlace{"late", member.rank()}));
    must(member.meet());
    const auto keys = bench::made_up_keys(77, kPages);
    const auto pages = scattered(keys);
    write_all(*rank, keys, pages);
    must(member.meet());
    const LeaseId lease = must(rank->reserve(keys, kPages));
    if (!member.first()) must(member.meet());  // the first has loaded
    load_and_check(*rank, lease, pages, spec.layers, true);
    if (member.first()) must(member.meet());
    must(member.meet());
    // Posted together again, they are exchanged again.
    load_and_check(*rank, lease, pages, spec.layers, true);
    must(rank->release(lease));
    must(member.meet());
  });
  const Json mla = cuda_status(daemon).at("mla");
  INFO(mla.dump());
  CHECK(mla.at("direct").at("late") >= 1);
  CHECK(mla.at("exchanged").get<int>() + mla.at("direct").at("late").get<int>() == 2);
  CHECK(daemon.stop() == 0);
}

TEST_CASE("A rank killed in mid exchange: the other's load ends, right or failed, and nothing lands later",
          "[gpus]") {
  if (!two_gpus()) return;
  const char* wanted = std::getenv("HICACHE_GPU_RANK_KILLS");
  const int kills = wanted == nullptr ? 8 : std::atoi(wanted);
  TestDaemon daemon(exchange_config("1GiB", 1'000'000));
  await_pinned(daemon);
  constexpr std::uint32_t kBigPages = 256;
  int completed = 0;
  int failed = 0;
  for (int round = 0; round < kills; ++round) {
    auto board = must(bench::SharedObject<GroupBoard>::create());
    const auto ready_group = [&](GroupMember& member, const Gpu& gpu) {
      // 2 MiB a page: 512 MiB take about 5 ms.
      auto rank = must(GpuRank::attach(gpu, daemon.socket_path(), group_spec(2, 16, 4096), kBigPages,
                                       round % 2 == 0 ? BufferLayout::together : BufferLayout::separate,
                                       GroupPlace{fmt::format("kill-{}", round), member.rank()}));
      must(member.meet());
      return rank;
    };
    const auto keys = bench::made_up_keys(1000 + static_cast<std::uint64_t>(round), kBigPages);
    const auto pages = scattered(keys);
    Child victim = start_rank_on(1, [&](const Gpu& gpu) {
      GroupMember member(*board, 1, 2);
      auto rank = ready_group(member, gpu);
      write_all(*rank, keys, pages);
      const LeaseId lease = must(rank->reserve(keys, kBigPages));
      must(member.meet());
      must(rank->session().load(lease, 0, places(pages), LayerFence{0, 1}));
      const std::uint64_t end = monotonic_ns() + 100'000 + 600'000 * static_cast<std::uint64_t>(round % 8);
      while (monotonic_ns() < end) {
      }
      ::kill(::getpid(), SIGKILL);
    });
    Child survivor = start_rank_on(0, [&](const Gpu& gpu) {
      GroupMember member(*board, 0, 2);
      auto rank = ready_group(member, gpu);
      write_all(*rank, keys, pages);
      const LeaseId lease = must(rank->reserve(keys, kBigPages));
      must(rank->memory().poison(pages));
      must(rank->memory().synchronize());
      must(member.meet());
      const LayerFence fence{0, rank->next_fence()};
      const auto ticket = must(rank->session().load(lease, 0, places(pages), fence, 5'000));
      for (std::uint32_t layer = 0; layer < 16; ++layer)
        must(rank->session().stream_wait_layer(rank->memory().stream(), fence, layer));
      must(rank->memory().synchronize());  // the stream is released whatever happens
      const Outcome loaded = rank->session().load_result(fence, kPatienceMs);
      auto result = must(rank->session().wait(ticket, kPatienceMs));
      expect(loaded.status() == result.status || result.status == Status::ok,
             "load_result tells something else");
      if (result.status == Status::ok) {
        must(loaded);
        expect_right(*rank, pages);
      }
      if (result.pages_busy) {
        result = must(rank->session().wait(ticket, kPatienceMs));
        expect(result.pages_returned, "pages were not returned");
      }
      // From now on the pages are the rank's: nothing may land in them any more.
      const auto other = scattered(bench::made_up_keys(5000 + static_cast<std::uint64_t>(round), kBigPages));
      must(rank->memory().fill(other, 0));
      must(rank->memory().synchronize());
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      expect_right(*rank, other);
      say(result.status == Status::ok || loaded ? "completed" : "failed");
    });
    const auto line = survivor.read_line();
    require_success(survivor);
    REQUIRE(victim.wait(kPatienceMs).has_value());
    (line == "completed" ? completed : failed) += 1;
    must(control(daemon.socket_path(), {"clear"}));
  }
  std::printf("rank killed in mid exchange: %d loads of the other rank completed, %d failed\n", completed,
              failed);
  CHECK(completed + failed == kills);
  // The daemon serves both GPUs as before.
  exchange_round_trip(daemon.socket_path(), 2, BufferLayout::together, true, 9999);
  const Json status = cuda_status(daemon);
  for (const Json& gpu : status.at("gpus")) CHECK(gpu.at("state") == "serving");
  CHECK(daemon.stop() == 0);
}

}  // namespace hicache::test
