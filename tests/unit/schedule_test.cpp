// How the daemon chooses the order of a GPU's copies, and what it says where there is no GPU.
#include "daemon/transfer/schedule.hpp"

#include "daemon/cuda/cuda_path.hpp"
#include "tests/support/catch.hpp"

namespace hicache::daemon {
namespace {

NamespaceSpec spec_of(std::uint32_t layers, std::uint32_t heads, std::uint32_t page_tokens) {
  NamespaceSpec s;
  s.attention = Attention::mha;
  s.page_tokens = page_tokens;
  s.layers = layers;
  s.heads_per_shard = heads;
  s.head_dim = 128;
  s.element_bytes = 2;
  return s;
}

constexpr std::uint32_t kPages = 64;

// All tensors in one allocation, kinds behind each other: one constant stride over all layers of K and V.
DeviceGeometry together(const NamespaceSpec& spec) {
  DeviceGeometry g;
  g.pages = kPages;
  const std::uint64_t tensor = kPages * spec.piece_bytes();
  const std::vector<TensorKind> kinds = spec.attention == Attention::mla
                                            ? std::vector{TensorKind::latent}
                                            : std::vector{TensorKind::k, TensorKind::v};
  for (const TensorKind kind : kinds) {
    for (std::uint32_t layer = 0; layer < spec.layers; ++layer) {
      g.tensors.push_back(
          {0, layer, kind, g.tensors.size() * tensor, spec.piece_bytes(), spec.piece_bytes()});
    }
  }
  g.allocations.push_back({DeviceKind::cuda, g.tensors.size() * tensor});
  return g;
}

DeviceGeometry separate(const NamespaceSpec& spec) {
  DeviceGeometry g = together(spec);
  g.allocations.resize(g.tensors.size(), g.allocations[0]);
  for (std::uint32_t i = 0; i < g.tensors.size(); ++i) {
    g.tensors[i].allocation = i;
    g.tensors[i].offset = 0;
  }
  return g;
}

// All layers of a page behind each other on the device, as in the pool.
DeviceGeometry page_first(const NamespaceSpec& spec) {
  DeviceGeometry g = together(spec);
  for (std::uint32_t i = 0; i < g.tensors.size(); ++i) {
    g.tensors[i].offset = i * spec.piece_bytes();
    g.tensors[i].page_stride = spec.shard_bytes();
  }
  return g;
}

// Pages in so many runs, all of them behind each other in the pool.
PageRuns in_runs(std::uint64_t pages, std::uint64_t runs) {
  return {pages, runs, 1};
}

constexpr std::uint64_t kSlot = 16 * kMiB;

}  // namespace

TEST_CASE("layers with a constant stride are one pitched copy a page") {
  const NamespaceSpec spec = spec_of(80, 1, 64);
  const GroupShape all = group_shape(spec, together(spec), 0, spec.layers);
  CHECK(all.pitched == 1);
  CHECK(all.contiguous == 0);
  CHECK(all.rows == 160);
  // Some of the layers are two: the others of K lie between them and V.
  CHECK(group_shape(spec, together(spec), 0, 8).pitched == 2);
}

TEST_CASE("an allocation for each layer leaves one contiguous copy a layer and run") {
  const NamespaceSpec spec = spec_of(80, 1, 64);
  const GroupShape all = group_shape(spec, separate(spec), 0, spec.layers);
  CHECK(all.pitched == 0);
  CHECK(all.contiguous == 160);
}

TEST_CASE("a group of layers is planned as that part of the whole plan") {
  const NamespaceSpec spec = spec_of(6, 1, 16);
  const DeviceGeometry g = together(spec);
  const std::vector<PagePair> pages = {{DevicePage{3}, PoolOffset{0}},
                                       {DevicePage{9}, PoolOffset{spec.shard_bytes()}}};
  CopyPlan whole;
  plan_pages(spec, g, pages, 0, whole);
  std::uint64_t bytes = 0;
  for (std::uint32_t first = 0; first < spec.layers; first += 2) {
    CopyPlan part;
    plan_group(spec, g, pages, first, first + 2, 0, part);
    for (const CopyRun& run : part.runs) {
      CHECK(run.first_layer >= first);
      CHECK(run.last_layer < first + 2);
    }
    bytes += part.bytes;
  }
  CHECK(bytes == whole.bytes);
}

TEST_CASE("page runs are counted where both sides advance evenly") {
  const auto page = [](std::uint32_t device, std::uint64_t host) {
    return PagePair{DevicePage{device}, PoolOffset{host}};
  };
  CHECK(count_page_runs({}).both == 0);
  const std::vector<PagePair> one = {page(5, 0), page(6, 100), page(7, 200)};
  CHECK(count_page_runs(one).both == 1);
  const std::vector<PagePair> gap = {page(5, 0), page(6, 100), page(7, 300)};
  CHECK(count_page_runs(gap).both == 2);
  CHECK(count_page_runs(gap).pool == 2);
  const std::vector<PagePair> shuffled = {page(7, 0), page(2, 100), page(5, 200)};
  CHECK(count_page_runs(shuffled).both == 3);
  CHECK(count_page_runs(shuffled).pool == 1);  // evenly apart in the pool all the same
}

TEST_CASE("a write takes whole pages where layers have a constant stride, and layers where they have none") {
  const NamespaceSpec spec = spec_of(32, 8, 64);
  const Schedules strided(spec, together(spec), TransferMethod::automatic);
  CHECK(strided.choose(in_runs(64, 64), false) == Schedule{PlanOrder::page_major, 32, 32});
  const Schedules apart(spec, separate(spec), TransferMethod::automatic);
  CHECK(apart.choose(in_runs(64, 1), false).order == PlanOrder::layer_major);
}

TEST_CASE("many small pages in one run go layer by layer, single ones page by page") {
  const NamespaceSpec spec = spec_of(32, 8, 1);
  const Schedules schedules(spec, together(spec), TransferMethod::automatic);
  CHECK(schedules.choose(in_runs(4096, 1), false).order == PlanOrder::layer_major);
  CHECK(schedules.choose(in_runs(4096, 4096), false).order == PlanOrder::page_major);
}

TEST_CASE("pages that are contiguous on both sides are not cut into layers unless layers are announced") {
  const NamespaceSpec spec = spec_of(32, 8, 16);
  const Schedules schedules(spec, page_first(spec), TransferMethod::automatic);
  CHECK(schedules.choose(in_runs(64, 1), false) == Schedule{PlanOrder::page_major, 32, 32});
}

TEST_CASE("a load that announces layers has its first layers early and costs little more") {
  for (const std::uint32_t heads : {1u, 8u}) {
    const NamespaceSpec spec = spec_of(80, heads, 64);
    const Schedules schedules(spec, together(spec), TransferMethod::automatic);
    for (const std::uint64_t runs : {1u, 16u, 256u}) {
      CAPTURE(heads, runs);
      const Schedule early = schedules.choose(in_runs(256, runs), true);
      const Schedule best = schedules.choose(in_runs(256, runs), false);
      CHECK(early.first_group * 10 <= spec.layers);
      CHECK(schedules.estimate_ns(early, in_runs(256, runs)) <=
            1.35 * schedules.estimate_ns(best, in_runs(256, runs)));
    }
  }
}

TEST_CASE("short pieces and short runs go through staging memory, long ones and single pages do not") {
  const auto chosen = [](const NamespaceSpec& spec, const DeviceGeometry& g, const PageRuns& pages) {
    return Schedules(spec, g, TransferMethod::automatic, kSlot).choose(pages, false).staged;
  };
  for (const std::uint32_t heads : {1u, 8u}) {
    const NamespaceSpec token = spec_of(32, heads, 1);
    CHECK(chosen(token, together(token), in_runs(4096, 4096)));
    CHECK(chosen(token, separate(token), in_runs(4096, 256)));
    CHECK_FALSE(chosen(token, together(token), in_runs(1, 1)));
  }
  const NamespaceSpec narrow = spec_of(80, 1, 16);
  CHECK(chosen(narrow, together(narrow), in_runs(1024, 1024)));
  const NamespaceSpec longer = spec_of(80, 1, 64);
  CHECK(chosen(longer, together(longer), in_runs(409, 409)));
  const NamespaceSpec wide = spec_of(32, 8, 64);
  CHECK_FALSE(chosen(wide, together(wide), in_runs(128, 128)));
  CHECK_FALSE(chosen(wide, page_first(wide), in_runs(128, 1)));
  CHECK(chosen(wide, separate(wide), in_runs(128, 32)));
  CHECK(chosen(wide, separate(wide), in_runs(128, 1)));
}

TEST_CASE("a staged load that announces its layers has the first ones early") {
  for (const TransferMethod method : {TransferMethod::automatic, TransferMethod::staged}) {
    for (const std::uint32_t tokens : {1u, 16u, 64u}) {
      CAPTURE(tokens);
      const NamespaceSpec spec = spec_of(80, 1, tokens);
      const Schedules schedules(spec, together(spec), method, kSlot);
      const Schedule early = schedules.choose(in_runs(4096 / tokens, 4096 / tokens), true);
      CHECK(early.staged);
      CHECK(early.first_group * 10 <= spec.layers);
    }
  }
}

TEST_CASE("layers that are announced one group after the other are worth short rows, not many of them") {
  constexpr std::uint32_t kLatent = 0;
  const auto groups = [](std::uint32_t layers, std::uint32_t heads, std::uint32_t tokens) {
    NamespaceSpec spec = spec_of(layers, heads, tokens);
    if (heads == kLatent) {
      spec.attention = Attention::mla;
      spec.heads_per_shard = 1;
      spec.head_dim = 576;
    }
    const Schedule s = Schedules(spec, together(spec), TransferMethod::staged, kSlot)
                           .choose(in_runs(16384 / tokens, 16384 / tokens), true);
    CHECK(s.first_group == (layers + 39) / 40);
    return 1 + (layers - s.first_group + s.group - 1) / s.group;
  };
  CHECK(groups(32, 8, 64) == 17);  // rows of 256 KiB
  CHECK(groups(80, 1, 64) == 5);   // 80 KiB in 16 groups ran at 0.6 of the link beside a busy model
  CHECK(groups(32, 8, 16) == 5);
  CHECK(groups(80, 1, 16) == 2);
  CHECK(groups(32, 8, 1) == 2);
  CHECK(groups(80, 1, 1) == 2);
  CHECK(groups(61, kLatent, 64) == 16);
  CHECK(groups(61, kLatent, 16) == 5);
  CHECK(groups(61, kLatent, 1) == 2);
}

TEST_CASE("pages that lie anywhere in the pool are staged only where that saves copies") {
  const NamespaceSpec spec = spec_of(32, 8, 64);  // pages of 8 MiB
  const Schedules schedules(spec, together(spec), TransferMethod::automatic, kSlot);
  CHECK_FALSE(schedules.choose({64, 64, 64}, false).staged);
  const NamespaceSpec token = spec_of(32, 8, 1);
  CHECK(Schedules(token, together(token), TransferMethod::automatic, kSlot)
            .choose({4096, 4096, 2048}, false)
            .staged);
}

TEST_CASE("a transfer that can't be staged is not, whatever the configuration says") {
  const NamespaceSpec spec = spec_of(32, 8, 1);
  for (const TransferMethod method : {TransferMethod::automatic, TransferMethod::staged}) {
    const Schedules schedules(spec, together(spec), method, kSlot);
    for (const bool announces : {false, true}) {
      CHECK(schedules.choose(in_runs(4096, 4096), announces, true).staged);
      CHECK_FALSE(schedules.choose(in_runs(4096, 4096), announces, false).staged);
    }
  }
}

TEST_CASE("without staging memory, or with slots that hold no layer of a page, nothing is staged") {
  const NamespaceSpec spec = spec_of(32, 8, 1);
  for (const std::uint64_t slot : {std::uint64_t{0}, spec.piece_bytes()}) {
    for (const TransferMethod method : {TransferMethod::automatic, TransferMethod::staged})
      CHECK_FALSE(Schedules(spec, together(spec), method, slot).choose(in_runs(4096, 4096), false).staged);
  }
}

TEST_CASE("the configured method is kept to, whatever it costs") {
  const NamespaceSpec spec = spec_of(32, 8, 64);
  CHECK(Schedules(spec, together(spec), TransferMethod::layer_major).choose(in_runs(64, 64), false).order ==
        PlanOrder::layer_major);
  CHECK(Schedules(spec, separate(spec), TransferMethod::page_major).choose(in_runs(64, 1), true).order ==
        PlanOrder::page_major);
  CHECK(Schedules(spec, together(spec), TransferMethod::staged, kSlot).choose(in_runs(1, 1), true).staged);
  for (const TransferMethod method : {TransferMethod::contiguous, TransferMethod::batched}) {
    const Schedule one = Schedules(spec, separate(spec), method, kSlot).choose(in_runs(64, 1), false);
    CHECK((one.order == PlanOrder::page_major && !one.staged));
  }
}

TEST_CASE("a daemon with CUDA switched off refuses GPU memory with the reason") {
  CudaOptions options;
  options.mode = CudaMode::off;
  const auto path = make_cuda_path(options);
  CHECK_FALSE(path->status().on);
  const NamespaceSpec spec = spec_of(2, 1, 1);
  const auto import = path->import(spec, together(spec), std::nullopt, {}, nullptr);
  REQUIRE(import.status() == Status::not_permitted);
  CHECK(import.error().message.find("CUDA off: cuda.mode is \"off\"") != std::string::npos);
}

}  // namespace hicache::daemon
