// The planner against a byte map worked out the slow way, and the number of copies it needs for known
// geometries.
#include "daemon/transfer/planner.hpp"

#include <algorithm>
#include <numeric>
#include <random>

#include "tests/support/catch.hpp"

namespace hicache::daemon {
namespace {

NamespaceSpec make_spec(Attention attention, std::uint32_t layers, std::uint32_t piece_bytes) {
  NamespaceSpec spec;
  spec.attention = attention;
  spec.layers = layers;
  spec.page_tokens = 1;
  spec.heads_per_shard = 1;
  spec.head_dim = piece_bytes;
  spec.element_bytes = 1;
  return spec;
}

enum class Shape {
  tensor_each,      // every tensor an allocation of its own
  kind_layer_page,  // one allocation: [kind][layer][page]
  layer_kind_page,  // one allocation: [layer][kind][page]
  kinds_apart,      // an allocation for each kind: [layer][page]
  page_layer_kind,  // one allocation, a block for each page: [page][layer][kind]
  page_kind_layer,  // one allocation, pages as in the pool: [page][kind][layer]
  scattered,        // one allocation: tensors in any order with gaps of any size
};
constexpr int kShapes = 7;

// `padding` bytes follow every page of a tensor, or every block of a page.
DeviceGeometry make_geometry(const NamespaceSpec& spec, Shape shape, std::uint32_t pages,
                             std::uint64_t padding, std::mt19937_64& random) {
  DeviceGeometry g;
  g.pages = pages;
  const std::uint64_t piece = spec.piece_bytes();
  const std::uint32_t kinds = spec.kinds();
  const std::uint64_t tensor_bytes = pages * (piece + padding);
  const std::uint64_t block = kinds * spec.layers * piece + padding;
  std::vector<std::uint64_t> order(std::size_t{kinds} * spec.layers);
  std::iota(order.begin(), order.end(), std::uint64_t{0});
  std::shuffle(order.begin(), order.end(), random);
  std::uint64_t scattered_at = 0;
  std::vector<std::uint64_t> scattered(order.size());
  for (const auto i : order) {
    scattered_at += random() % 100;
    scattered[i] = scattered_at;
    scattered_at += tensor_bytes;
  }
  for (std::uint32_t kind = 0; kind < kinds; ++kind) {
    for (std::uint32_t layer = 0; layer < spec.layers; ++layer) {
      DeviceTensor t;
      t.layer = layer;
      t.kind = kinds == 1 ? TensorKind::latent : static_cast<TensorKind>(kind);
      t.page_bytes = piece;
      t.page_stride = piece + padding;
      const std::uint64_t kind_major = std::uint64_t{kind} * spec.layers + layer;
      const std::uint64_t layer_major = std::uint64_t{layer} * kinds + kind;
      switch (shape) {
        case Shape::tensor_each:
          t.allocation = static_cast<std::uint32_t>(kind_major);
          break;
        case Shape::kind_layer_page:
          t.offset = kind_major * tensor_bytes;
          break;
        case Shape::layer_kind_page:
          t.offset = layer_major * tensor_bytes;
          break;
        case Shape::kinds_apart:
          t.allocation = kind;
          t.offset = layer * tensor_bytes;
          break;
        case Shape::page_layer_kind:
          t.offset = layer_major * piece;
          t.page_stride = block;
          break;
        case Shape::page_kind_layer:
          t.offset = kind_major * piece;
          t.page_stride = block;
          break;
        case Shape::scattered:
          t.offset = scattered[kind_major];
          break;
      }
      g.tensors.push_back(t);
    }
  }
  for (const auto& t : g.tensors) {
    if (g.allocations.size() <= t.allocation) g.allocations.resize(t.allocation + 1);
    auto& bytes = g.allocations[t.allocation].bytes;
    bytes = std::max(bytes, t.offset + (pages - 1) * t.page_stride + t.page_bytes);
  }
  std::shuffle(g.tensors.begin(), g.tensors.end(), random);
  return g;
}

// Side pools of a hybrid model: some with a tensor behind the other, some with an allocation each.
void add_side_pools(NamespaceSpec& spec, std::mt19937_64& random) {
  for (std::uint64_t pools = random() % 3; pools > 0; --pools) {
    const bool alike = random() % 2 == 0;
    spec.side_pools.push_back(
        {"pool " + std::to_string(pools), random() % 2 == 0 ? HitRule::all_pages : HitRule::trailing_pages,
         alike ? spec.layers : 1 + static_cast<std::uint32_t>(random() % 4), 8 * (1 + random() % 5)});
  }
}
void add_side_tensors(const NamespaceSpec& spec, DeviceGeometry& g, std::uint32_t states,
                      std::mt19937_64& random) {
  g.states = spec.has_states() ? states : 0;
  for (std::uint32_t pool = 0; pool < spec.side_pools.size(); ++pool) {
    const SidePool& side = spec.side_pools[pool];
    const bool behind_each_other = random() % 2 == 0;
    const std::uint64_t pages = side.rule == HitRule::trailing_pages ? g.states : g.pages;
    for (std::uint32_t layer = 0; layer < side.layers; ++layer) {
      if (layer == 0 || !behind_each_other) g.allocations.push_back({DeviceKind::host, 0});
      auto& bytes = g.allocations.back().bytes;
      g.tensors.push_back({static_cast<std::uint32_t>(g.allocations.size() - 1), layer, TensorKind::side,
                           bytes, side.piece_bytes, side.piece_bytes, pool});
      bytes += pages * side.piece_bytes;
    }
  }
  std::shuffle(g.tensors.begin(), g.tensors.end(), random);
}

struct DeviceByte {
  std::int64_t allocation = -1;
  std::uint64_t offset = 0;
  std::uint32_t layer = 0;
};

// What every byte of the pool must be copied from or to.
std::vector<DeviceByte> expected_bytes(const NamespaceSpec& spec, const DeviceGeometry& geometry,
                                       const std::vector<PagePair>& pages, std::uint64_t pool_bytes) {
  std::vector<DeviceByte> map(pool_bytes);
  for (const auto& page : pages) {
    for (const auto& t : geometry.tensors) {
      const DevicePage device = holds_states(spec, t) ? page.state : page.device;
      if (device.is_none()) continue;
      for (std::uint64_t i = 0; i < t.page_bytes; ++i) {
        map.at(page.host.value + shard_piece_offset(spec, t) + i) =
            DeviceByte{t.allocation, t.offset + device.value * t.page_stride + i, announced_with(spec, t)};
      }
    }
  }
  return map;
}

// Counts what is wrong with a plan; no assertion a byte, which would be slow.
struct Faults {
  int wrong_byte = 0;
  int copied_twice = 0;
  int missing = 0;
  int wrong_layer = 0;
  int border_crossed = 0;
  int unsorted = 0;
  int bad_pitch = 0;

  [[nodiscard]] int total() const {
    return wrong_byte + copied_twice + missing + wrong_layer + border_crossed + unsorted + bad_pitch;
  }
};

Faults examine(const CopyPlan& plan, const std::vector<DeviceByte>& expected, PlanOrder order,
               std::uint64_t border) {
  Faults faults;
  std::vector<bool> copied(expected.size());
  std::uint64_t bytes = 0;
  for (std::size_t n = 0; n < plan.runs.size(); ++n) {
    const CopyRun& run = plan.runs[n];
    bytes += run.bytes();
    if (run.device_pitch < run.width || run.host_pitch < run.width) ++faults.bad_pitch;
    const std::uint64_t end = run.host_offset + (run.rows - 1) * run.host_pitch + run.width;
    if (border != 0 && run.host_offset / border != (end - 1) / border) ++faults.border_crossed;
    if (n > 0) {
      const CopyRun& before = plan.runs[n - 1];
      const bool same_group = order == PlanOrder::page_major || before.last_layer == run.last_layer;
      if (same_group ? before.host_offset > run.host_offset : before.last_layer > run.last_layer)
        ++faults.unsorted;
    }
    for (std::uint64_t row = 0; row < run.rows; ++row) {
      for (std::uint64_t i = 0; i < run.width; ++i) {
        const std::uint64_t host = run.host_offset + row * run.host_pitch + i;
        const std::uint64_t device = run.device_offset + row * run.device_pitch + i;
        const DeviceByte& want = expected.at(host);
        if (want.allocation != run.allocation || want.offset != device) ++faults.wrong_byte;
        if (want.layer < run.first_layer || want.layer > run.last_layer) ++faults.wrong_layer;
        if (copied[host]) ++faults.copied_twice;
        copied[host] = true;
      }
    }
  }
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (expected[i].allocation >= 0 && !copied[i]) ++faults.missing;
  }
  if (bytes != plan.bytes) ++faults.missing;
  return faults;
}

// `count` pages: device pages from `device` on, host pages `host_step` bytes apart.
std::vector<PagePair> consecutive(std::uint32_t count, std::uint32_t device, std::uint64_t host,
                                  std::uint64_t host_step) {
  std::vector<PagePair> pages;
  for (std::uint32_t i = 0; i < count; ++i)
    pages.push_back({DevicePage{device + i}, PoolOffset{host + i * host_step}});
  return pages;
}

CopyPlan plan_of(const NamespaceSpec& spec, Shape shape, const std::vector<PagePair>& pages, PlanOrder order,
                 std::uint64_t border = 0, std::uint64_t padding = 0) {
  std::mt19937_64 random(1);
  return plan_copy(spec, make_geometry(spec, shape, 64, padding, random), pages, order, border);
}

constexpr auto kPageMajor = PlanOrder::page_major;
constexpr auto kLayerMajor = PlanOrder::layer_major;

}  // namespace

TEST_CASE("every byte of every page is copied exactly once from the right place, in random geometries") {
  const std::uint64_t seed = std::random_device{}();
  std::mt19937_64 random(seed);
  for (int round = 0; round < 600; ++round) {
    const auto attention = random() % 2 == 0 ? Attention::mha : Attention::mla;
    auto spec = make_spec(attention, 1 + static_cast<std::uint32_t>(random() % 6),
                          1 + static_cast<std::uint32_t>(random() % 40));
    add_side_pools(spec, random);
    const auto shape = static_cast<Shape>(random() % kShapes);
    const std::uint64_t padding = random() % 3 == 0 ? random() % 50 : 0;
    const std::uint32_t device_pages = 1 + static_cast<std::uint32_t>(random() % 40);
    auto geometry = make_geometry(spec, shape, device_pages, padding, random);
    add_side_tensors(spec, geometry, device_pages, random);
    const std::uint64_t slot = spec.shard_bytes() + (random() % 2 == 0 ? 0 : random() % 60);
    const std::uint32_t slots = 60;

    std::vector<std::uint32_t> host(slots);
    std::iota(host.begin(), host.end(), 0u);
    std::vector<std::uint32_t> device(device_pages);
    std::iota(device.begin(), device.end(), 0u);
    // Sometimes in runs, sometimes at random.
    if (random() % 2 == 0) std::shuffle(host.begin(), host.end(), random);
    if (random() % 2 == 0) std::shuffle(device.begin(), device.end(), random);
    std::vector<PagePair> pages;
    for (std::uint32_t i = 0; i < device_pages; ++i) {
      if (random() % 8 == 0) continue;
      // A state slot serves one page; which one is of no importance.
      const DevicePage state = random() % 3 == 0 ? DevicePage{device_pages - 1 - device[i]} : DevicePage{};
      pages.push_back({DevicePage{device[i]}, PoolOffset{7 + host[i] * slot}, state});
    }
    if (random() % 2 == 0) std::shuffle(pages.begin(), pages.end(), random);

    const std::uint64_t border = random() % 2 == 0 ? 0 : 1 + random() % (6 * slot);
    const auto order = random() % 2 == 0 ? kPageMajor : kLayerMajor;
    const auto plan = plan_copy(spec, geometry, pages, order, border);
    const auto faults = examine(plan, expected_bytes(spec, geometry, pages, 7 + slots * slot), order, border);
    INFO("seed " << seed << " round " << round << " shape " << static_cast<int>(shape) << " border "
                 << border);
    CAPTURE(faults.wrong_byte, faults.copied_twice, faults.missing, faults.wrong_layer, faults.border_crossed,
            faults.unsorted, faults.bad_pitch);
    REQUIRE(faults.total() == 0);
  }
}

TEST_CASE("a plan made in parts is the same plan") {
  std::mt19937_64 random(5);
  const auto spec = make_spec(Attention::mha, 5, 16);
  const auto geometry = make_geometry(spec, Shape::layer_kind_page, 32, 0, random);
  auto pages = consecutive(20, 3, 0, 256);
  std::shuffle(pages.begin(), pages.end(), random);
  CopyPlan part;
  std::vector<CopyRun> runs;
  for (std::uint32_t layer = 0; layer < spec.layers; ++layer) {
    plan_layer(spec, geometry, pages, layer, 1024, part);
    runs.insert(runs.end(), part.runs.begin(), part.runs.end());
  }
  REQUIRE(runs == plan_copy(spec, geometry, pages, kLayerMajor, 1024).runs);
  plan_pages(spec, geometry, pages, 1024, part);
  REQUIRE(part.runs == plan_copy(spec, geometry, pages, kPageMajor, 1024).runs);
}

TEST_CASE("page_major needs one pitched run a page where K and V continue one stride") {
  const auto spec = make_spec(Attention::mha, 8, 32);
  const std::vector<PagePair> pages = {{DevicePage{9}, PoolOffset{0}}, {DevicePage{2}, PoolOffset{4096}}};
  const auto plan = plan_of(spec, Shape::kind_layer_page, pages, kPageMajor);
  REQUIRE(plan.runs.size() == 2);
  const CopyRun& run = plan.runs[0];
  REQUIRE(run.width == 32);
  REQUIRE(run.rows == 16);
  REQUIRE(run.device_offset == 9 * 32);
  REQUIRE(run.device_pitch == 64 * 32);  // 64 pages a tensor
  REQUIRE(run.host_pitch == 32);
  REQUIRE(run.first_layer == 0);
  REQUIRE(run.last_layer == 7);
}

TEST_CASE("page_major needs one pitched run a page and kind where K and V are apart") {
  const auto spec = make_spec(Attention::mha, 8, 32);
  const auto pages = consecutive(5, 10, 0, 1024);
  for (const auto shape : {Shape::kinds_apart, Shape::layer_kind_page, Shape::page_layer_kind}) {
    const auto plan = plan_of(spec, shape, pages, kPageMajor);
    REQUIRE(plan.runs.size() == 2 * pages.size());
    REQUIRE(plan.runs[0].rows == 8);
    REQUIRE(plan.runs[0].width == 32);
  }
}

TEST_CASE("pages that are contiguous on both sides become one wide run") {
  const auto spec = make_spec(Attention::mha, 4, 32);
  const auto pages = consecutive(16, 8, 512, spec.shard_bytes());
  const auto plan = plan_of(spec, Shape::page_kind_layer, pages, kPageMajor);
  REQUIRE(plan.runs.size() == 1);
  REQUIRE(plan.runs[0].rows == 1);
  REQUIRE(plan.runs[0].width == 16 * spec.shard_bytes());
  REQUIRE(plan.runs[0].device_pitch == plan.runs[0].width);
}

TEST_CASE("contiguous device pages with a constant host distance become the rows of one run") {
  const auto spec = make_spec(Attention::mha, 4, 32);
  for (const std::uint64_t distance : {spec.shard_bytes() + 64, 2 * spec.shard_bytes()}) {
    const auto plan = plan_of(spec, Shape::page_kind_layer, consecutive(16, 8, 512, distance), kPageMajor);
    REQUIRE(plan.runs.size() == 1);
    REQUIRE(plan.runs[0].rows == 16);
    REQUIRE(plan.runs[0].width == spec.shard_bytes());
    REQUIRE(plan.runs[0].host_pitch == distance);
    REQUIRE(plan.runs[0].device_pitch == spec.shard_bytes());
  }
}

TEST_CASE("layer_major makes one pitched run of consecutive pages for each tensor") {
  for (const auto attention : {Attention::mha, Attention::mla}) {
    const auto spec = make_spec(attention, 6, 32);
    const auto plan = plan_of(spec, Shape::tensor_each, consecutive(16, 3, 0, 1024), kLayerMajor);
    REQUIRE(plan.runs.size() == 6 * spec.kinds());
    for (std::size_t i = 0; i < plan.runs.size(); ++i) {
      REQUIRE(plan.runs[i].rows == 16);
      REQUIRE(plan.runs[i].device_pitch == 32);
      REQUIRE(plan.runs[i].host_pitch == 1024);
      REQUIRE(plan.runs[i].first_layer == i / spec.kinds());
      REQUIRE(plan.runs[i].last_layer == i / spec.kinds());
    }
  }
}

TEST_CASE("page_major joins pages where every layer is an allocation of its own") {
  const auto spec = make_spec(Attention::mla, 6, 32);
  const auto plan = plan_of(spec, Shape::tensor_each, consecutive(16, 3, 0, 1024), kPageMajor);
  REQUIRE(plan.runs.size() == 6);
  REQUIRE(plan.runs[0].rows == 16);
}

TEST_CASE("pages that go the other way on the device stay single runs") {
  const auto spec = make_spec(Attention::mla, 2, 32);
  std::vector<PagePair> pages;
  for (std::uint32_t i = 0; i < 10; ++i) pages.push_back({DevicePage{20 - i}, PoolOffset{i * 1024ull}});
  REQUIRE(plan_of(spec, Shape::tensor_each, pages, kLayerMajor).runs.size() == 20);
}

TEST_CASE("one host page may go to two device pages") {
  const auto spec = make_spec(Attention::mla, 1, 32);
  const std::vector<PagePair> pages = {{DevicePage{4}, PoolOffset{64}}, {DevicePage{5}, PoolOffset{64}}};
  const auto plan = plan_of(spec, Shape::tensor_each, pages, kLayerMajor);
  REQUIRE(plan.runs.size() == 2);
  REQUIRE(plan.runs[0].device_offset == 4 * 32);
  REQUIRE(plan.runs[1].device_offset == 5 * 32);
}

TEST_CASE("runs end at a border of the pool") {
  const auto spec = make_spec(Attention::mla, 2, 32);
  const auto pages = consecutive(16, 0, 0, 1024);
  const auto plan = plan_of(spec, Shape::tensor_each, pages, kLayerMajor, 4096);
  REQUIRE(plan.runs.size() == 2 * 4);
  REQUIRE(plan.runs[0].rows == 4);
  // The pages after a border join each other, not those before it: 2048 and 3072, then 4096 and 6144.
  std::vector<PagePair> uneven = consecutive(3, 0, 2048, 1024);
  uneven.push_back({DevicePage{3}, PoolOffset{6144}});
  REQUIRE(plan_of(spec, Shape::tensor_each, uneven, kLayerMajor, 4096).runs.size() == 2 * 2);
  // A border inside a page cuts the page too: 64 contiguous bytes at 96 in windows of 100 bytes.
  const auto cut = plan_of(spec, Shape::page_kind_layer, {{DevicePage{1}, PoolOffset{96}}}, kPageMajor, 100);
  REQUIRE(cut.runs.size() == 2);
  REQUIRE(cut.runs[0].width == 4);
  REQUIRE(cut.runs[1].width == 60);
  REQUIRE(cut.runs[1].device_offset == 64 + 4);
}

TEST_CASE("no pages need no runs") {
  const auto spec = make_spec(Attention::mha, 2, 32);
  for (const auto order : {kPageMajor, kLayerMajor}) {
    const auto plan = plan_of(spec, Shape::kind_layer_page, {}, order);
    REQUIRE(plan.runs.empty());
    REQUIRE(plan.bytes == 0);
  }
}

TEST_CASE("AC-34 direct coalescing") {
  std::vector<std::int64_t> host = {8, 9, 10, 11, 0, 1, 2, 3};
  std::vector<std::int64_t> device = {100, 101, 102, 103, 104, 105, 106, 107};
  sort_by_host(host, device);
  REQUIRE(host == std::vector<std::int64_t>{0, 1, 2, 3, 8, 9, 10, 11});
  REQUIRE(device == std::vector<std::int64_t>{104, 105, 106, 107, 100, 101, 102, 103});
  const auto runs = coalesce_runs(host, device);
  REQUIRE(runs == std::vector<IndexRun>{{0, 104, 4}, {8, 100, 4}});
  const std::size_t layers = 4;
  const std::size_t kinds = 2;
  REQUIRE(runs.size() * layers * kinds == 16);

  // The planner needs as many copies for the same tokens, taken as pages of one token.
  const auto spec = make_spec(Attention::mha, layers, 64);
  std::mt19937_64 random(1);
  const auto geometry = make_geometry(spec, Shape::kind_layer_page, 128, 0, random);
  std::vector<PagePair> pages;
  for (std::size_t i = 0; i < host.size(); ++i) {
    pages.push_back({DevicePage{static_cast<std::uint32_t>(device[i])},
                     PoolOffset{static_cast<std::uint64_t>(host[i]) * spec.shard_bytes()}});
  }
  REQUIRE(plan_copy(spec, geometry, pages, kLayerMajor, 0).runs.size() == 16);
}

TEST_CASE("AC-35 direct coalescing, broken destination") {
  const std::vector<std::int64_t> source = {0, 1, 2, 3};
  const std::vector<std::int64_t> destination = {10, 11, 20, 21};
  REQUIRE(coalesce_runs(source, destination) == std::vector<IndexRun>{{0, 10, 2}, {2, 20, 2}});
}

TEST_CASE("sorting by host keeps the order of equal host indices") {
  std::vector<std::int64_t> host = {5, 1, 5, 1};
  std::vector<std::int64_t> device = {9, 8, 7, 6};
  sort_by_host(host, device);
  REQUIRE(host == std::vector<std::int64_t>{1, 1, 5, 5});
  REQUIRE(device == std::vector<std::int64_t>{8, 6, 9, 7});
}

}  // namespace hicache::daemon
