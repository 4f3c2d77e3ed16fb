// Loads that a group does together: which page takes which way, the copies between ranks, and when layers are
// announced and loads end. The copies are carried out by the CPU; everything else is what GPUs use.
#include "daemon/transfer/exchange.hpp"

#include <cstring>
#include <set>

#include "daemon/transfer/page_spread.hpp"
#include "daemon/transfer/peer_plan.hpp"
#include "shm/layer_fences.hpp"
#include "tests/unit/transfer_rig.hpp"

namespace hicache::daemon {
namespace {

constexpr std::uint32_t kDevicePages = 64;

struct FakeImport final : DeviceImport {
  explicit FakeImport(std::uint32_t on) : DeviceImport(nobody(), on) {}
  [[nodiscard]] bool reachable_from(std::uint32_t) const override { return reachable; }
  static Transfers& nobody() {
    struct Nobody final : Transfers {
      void submit(Transfer) override {}
      void cancel(TransferId) override {}
      void cancel_client(ClientSlot, Generation) override {}
    };
    static Nobody none;
    return none;
  }
  bool reachable = true;
};

// A group of MLA ranks, one for each entry of `devices`, with the pool of their pages.
struct Group {
  explicit Group(const std::vector<std::uint32_t>& devices, bool mixed_layouts = false,
                 std::uint32_t pages = 40)
      : count(pages) {
    for (std::uint32_t rank = 0; rank < devices.size(); ++rank) {
      RankShape shape;
      shape.attention = Attention::mla;
      shape.layers = 5;
      shape.piece_bytes = 96;
      shape.device_pages = kDevicePages;
      shape.separate = mixed_layouts && rank % 2 == 1;
      ranks.emplace_back(rank, shape);
      ranks.back().memory()->spec.tp_size = static_cast<std::uint32_t>(devices.size());
      auto import = std::make_unique<FakeImport>(devices[rank]);
      imports.push_back(import.get());
      ranks.back().memory()->device = std::move(import);
    }
    pool.resize(std::size_t{count} * ranks.front().shard_bytes());
    std::uint32_t key = 0;
    for (std::uint32_t i = 0; i < count; ++i, ++key) {  // page i of the request lies at host slot i
      ranks.front().fill(0, key);
      for (const DeviceTensor& t : ranks.front().memory()->geometry.tensors) {
        const auto* from =
            static_cast<std::uint8_t*>(ranks.front().memory()->allocations[t.allocation].data());
        std::memcpy(pool.data() + i * ranks.front().shard_bytes() +
                        shard_piece_offset(ranks.front().memory()->spec, t.layer, t.kind),
                    from + t.offset, t.page_bytes);
      }
    }
  }
  // Where rank `rank` wants page i: nothing is consecutive, and no two ranks agree.
  [[nodiscard]] static std::uint32_t place(std::uint32_t rank, std::uint32_t i) {
    return (i * 7 + rank * 11) % kDevicePages;
  }
  [[nodiscard]] std::vector<PagePair> pages(std::uint32_t rank) const {
    std::vector<PagePair> out;
    for (std::uint32_t i = 0; i < count; ++i)
      out.push_back({DevicePage{place(rank, i)}, PoolOffset{i * ranks.front().shard_bytes()}});
    return out;
  }
  [[nodiscard]] Transfer load(std::uint32_t rank, std::uint32_t fence = 0, std::uint32_t value = 1) const {
    Transfer t;
    t.id = TransferId{100 + rank};
    t.memory = ranks[rank].memory();
    t.direction = Direction::load;
    t.pages = pages(rank);
    t.fence = fence;
    t.fence_value = value;
    t.group = GroupLoad{7, 0, rank, static_cast<std::uint32_t>(ranks.size()), 2};
    return t;
  }
  // Both parts of the copies of one rank, as its GPU would do them.
  void run_part(std::uint32_t rank, const ExchangePart& part, std::uint32_t first_layer,
                std::uint32_t end_layer) {
    const RankMemory& own = *ranks[rank].memory();
    CopyPlan plan;
    plan_group(own.spec, own.geometry, part.pages, first_layer, end_layer, 0, plan);
    for (const CopyRun& run : plan.runs) {
      auto* device = static_cast<std::uint8_t*>(own.allocations[run.allocation].data());
      for (std::uint64_t row = 0; row < run.rows; ++row) {
        std::memcpy(device + run.device_offset + row * run.device_pitch,
                    pool.data() + run.host_offset + row * run.host_pitch, run.width);
      }
      link_bytes += run.bytes();
    }
    std::vector<DevicePage> from;
    for (const std::uint32_t index : part.passed) from.push_back(part.pages[index].device);
    for (const PassTarget& target : part.targets) {
      const RankMemory& other = *ranks[target.rank].memory();
      std::vector<PeerRun> runs;
      plan_peer_copies(own.spec, own.geometry, other.geometry, from, target.pages, first_layer, end_layer,
                       runs);
      for (const PeerRun& run : runs) {
        const auto* a = static_cast<std::uint8_t*>(own.allocations[run.from_allocation].data());
        auto* b = static_cast<std::uint8_t*>(other.allocations[run.to_allocation].data());
        for (std::uint64_t row = 0; row < run.rows; ++row) {
          const std::uint64_t to = run.to_offset + row * run.to_pitch;
          REQUIRE(to + run.width <= other.geometry.allocations[run.to_allocation].bytes);
          std::memcpy(b + to, a + run.from_offset + row * run.from_pitch, run.width);
        }
        passed_bytes += run.bytes();
        ++passed_copies;
      }
    }
  }
  void poison() const {
    for (const TestRank& rank : ranks) {
      for (std::uint32_t page = 0; page < kDevicePages; ++page) rank.poison(page);
    }
  }
  [[nodiscard]] bool all_hold() const {
    bool right = true;
    for (std::uint32_t rank = 0; rank < ranks.size(); ++rank) {
      for (std::uint32_t i = 0; i < count; ++i) right = right && ranks[rank].holds(place(rank, i), i);
    }
    return right;
  }
  [[nodiscard]] std::uint32_t layers_ready(std::uint32_t rank, std::uint32_t slot,
                                           std::uint32_t value) const {
    std::uint32_t n = 0;
    while (n < 5 && ranks[rank].layers(slot).layer[n].load() == value) ++n;
    return n;
  }

  std::uint32_t count;
  std::vector<TestRank> ranks;
  std::vector<FakeImport*> imports;
  std::vector<std::uint8_t> pool;
  std::uint64_t link_bytes = 0;
  std::uint64_t passed_bytes = 0;
  std::uint64_t passed_copies = 0;
};

ExchangeTable always() {
  return ExchangeTable(ExchangePolicy{MlaLoad::exchange, 1'000'000}, "");
}

struct Joined {
  std::shared_ptr<Exchange> exchange;
  std::vector<ExchangePart> parts;
};

Joined agree(ExchangeTable& table, const Group& group, std::uint32_t fence = 0, std::uint32_t value = 1) {
  Joined out;
  for (std::uint32_t rank = 0; rank < group.ranks.size(); ++rank) {
    if (rank > 0) CHECK(out.exchange->state() == Exchange::State::gathering);
    const auto joined = table.join(group.load(rank, fence, value), std::make_shared<Doorbell>());
    REQUIRE(joined != nullptr);
    if (rank > 0) CHECK(joined == out.exchange);
    out.exchange = joined;
  }
  REQUIRE(out.exchange->state() == Exchange::State::agreed);
  for (std::uint32_t rank = 0; rank < group.ranks.size(); ++rank)
    out.parts.push_back(out.exchange->take_part(rank));
  return out;
}

TransferJobPtr job_of(const Group& group, std::uint32_t rank, std::uint32_t fence = 0,
                      std::uint32_t value = 1) {
  return std::make_unique<TransferJob>(group.load(rank, fence, value));
}

}  // namespace

TEST_CASE("Pages spread over equal ways: in stripes, equally, and single pages in turn") {
  for (const std::uint32_t ways : {1u, 2u, 3u, 8u}) {
    for (const std::uint64_t count : {1ull, 2ull, 7ull, 64ull, 255ull, 1000ull, 4096ull}) {
      const PageSpread spread(5, count, ways);
      std::vector<std::uint64_t> pages(ways);
      std::uint64_t changes = 1;
      for (std::uint64_t i = 0; i < count; ++i) {
        REQUIRE(spread.way_of(i) < ways);
        ++pages[spread.way_of(i)];
        if (i > 0 && spread.way_of(i) != spread.way_of(i - 1)) ++changes;
      }
      const auto [least, most] = std::minmax_element(pages.begin(), pages.end());
      INFO("ways " << ways << " count " << count);
      CHECK(*most - *least <= std::max<std::uint64_t>(PageSpread::kStripePages, 1));
      if (count >= 1000) CHECK(static_cast<double>(*most) * ways <= 1.05 * static_cast<double>(count));
      CHECK(changes <= std::max<std::uint64_t>(ways, count / (PageSpread::kStripePages / 2) + ways));
    }
  }
  std::set<std::uint32_t> ways_of_single_pages;
  for (std::uint64_t first = 0; first < 4; ++first)
    ways_of_single_pages.insert(PageSpread(first, 1, 4).way_of(0));
  CHECK(ways_of_single_pages.size() == 4);
}

TEST_CASE("An exchange brings every page to every rank once, over one link for each GPU's ranks") {
  const std::vector<std::vector<std::uint32_t>> groups{
      {0, 1}, {0, 1, 0, 1}, {0, 0, 1}, {0, 1, 2, 3}, {3, 3, 2, 2, 1, 1, 0, 0}, {0, 0}};
  for (const auto& devices : groups) {
    for (const bool mixed : {false, true}) {
      for (const std::uint32_t pages : {1u, 3u, 40u}) {
        Group group(devices, mixed, pages);
        group.poison();
        std::vector<std::vector<PagePair>> lists;
        std::vector<ExchangeLoad> loads;
        for (std::uint32_t rank = 0; rank < devices.size(); ++rank) lists.push_back(group.pages(rank));
        for (std::uint32_t rank = 0; rank < devices.size(); ++rank)
          loads.push_back({devices[rank], lists[rank]});
        const auto parts = plan_exchange(0, loads);
        for (const auto& [first, end] : {std::pair{0u, 2u}, std::pair{2u, 5u}}) {
          for (std::uint32_t rank = 0; rank < devices.size(); ++rank)
            group.run_part(rank, parts[rank], first, end);
        }
        INFO("ranks " << devices.size() << " mixed " << mixed << " pages " << pages);
        CHECK(group.all_hold());
        // Nothing is copied twice.
        const std::uint64_t all = pages * group.ranks.front().shard_bytes() * devices.size();
        CHECK(group.link_bytes + group.passed_bytes == all);
        const std::set<std::uint32_t> distinct(devices.begin(), devices.end());
        if (distinct.size() == devices.size())
          CHECK(group.link_bytes == pages * group.ranks.front().shard_bytes());
      }
    }
  }
}

TEST_CASE("Copies between ranks are few: a page's layers in one, or a layer of consecutive pages in one") {
  const RankShape shape{Attention::mla, 6, 64, 32, false};
  const RankShape apart{Attention::mla, 6, 64, 32, true};
  const TestRank together(0, shape);
  const TestRank separate(1, apart);
  const auto copies = [](const TestRank& from, const TestRank& to, std::uint32_t step) {
    std::vector<DevicePage> pages;
    for (std::uint32_t i = 0; i < 8; ++i) pages.push_back(DevicePage{step == 0 ? (i * 5) % 32 : i * step});
    std::vector<PeerRun> runs;
    plan_peer_copies(from.memory()->spec, from.memory()->geometry, to.memory()->geometry, pages, pages, 0, 6,
                     runs);
    std::uint64_t bytes = 0;
    for (const PeerRun& run : runs) bytes += run.bytes();
    CHECK(bytes == 8 * from.shard_bytes());
    return runs.size();
  };
  CHECK(copies(together, together, 0) == 8);  // scattered: one a page
  CHECK(copies(together, together, 1) == 6);  // consecutive: one a layer
  CHECK(copies(together, together, 3) == 6);  // at a constant distance as well
  CHECK(copies(separate, separate, 1) == 6);
  CHECK(copies(together, separate, 2) == 6);
  CHECK(copies(separate, separate, 0) == 6 * 2);  // 0 5 10 15 20 25 30 and 3
}

TEST_CASE("A layer is announced to every rank once it has landed from every part, and to no rank before") {
  Group group({0, 1, 0});
  ExchangeTable table = always();
  const Joined joined = agree(table, group);
  Exchange& exchange = *joined.exchange;
  CHECK(exchange.announces_layers());
  exchange.landed(0, 3);
  exchange.landed(1, 2);
  for (std::uint32_t rank = 0; rank < 3; ++rank) CHECK(group.layers_ready(rank, 0, 1) == 0);
  exchange.landed(2, 5);
  for (std::uint32_t rank = 0; rank < 3; ++rank) CHECK(group.layers_ready(rank, 0, 1) == 2);
  exchange.landed(1, 5);
  for (std::uint32_t rank = 0; rank < 3; ++rank) CHECK(group.layers_ready(rank, 0, 1) == 3);
  exchange.landed(0, 5);
  for (std::uint32_t rank = 0; rank < 3; ++rank) CHECK(group.layers_ready(rank, 0, 1) == 5);
  CHECK(exchange.part_ended(1, job_of(group, 1)).empty());
  CHECK(exchange.part_ended(0, job_of(group, 0)).empty());
  CHECK(group.imports[2]->exchanging[0].load());
  const auto done = exchange.part_ended(2, job_of(group, 2));
  REQUIRE(done.size() == 3);
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    CHECK(done[rank].id == TransferId{100 + rank});
    CHECK(done[rank].status == Status::ok);
    CHECK(done[rank].bytes == 40 * group.ranks.front().shard_bytes());
    CHECK_FALSE(group.imports[rank]->exchanging[0].load());
    CHECK(group.ranks[rank].layers(0).failed.load() == 0);
  }
}

TEST_CASE("A part that fails fails the load on every rank, when no copy of any part is left") {
  Group group({0, 1});
  ExchangeTable table = always();
  const Joined joined = agree(table, group, 2, 9);
  Exchange& exchange = *joined.exchange;
  exchange.landed(0, 5);
  exchange.landed(1, 1);
  auto failed = job_of(group, 0, 2, 9);
  failed->verdict = Status::system_error;
  CHECK(exchange.part_ended(0, std::move(failed)).empty());
  // The other part sees it, but its copies are still landing: nobody is told yet.
  CHECK(exchange.verdict() == Status::system_error);
  CHECK(group.layers_ready(1, 2, 9) == 1);
  CHECK(group.ranks[1].layers(2).failed.load() == 0);
  const auto done = exchange.part_ended(1, job_of(group, 1, 2, 9));
  REQUIRE(done.size() == 2);
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    CHECK(done[rank].status == Status::system_error);
    CHECK(group.ranks[rank].layers(2).failed.load() == 9);
    CHECK(group.layers_ready(rank, 2, 9) == 5);  // released, which means failed
    CHECK_FALSE(group.imports[rank]->exchanging[2].load());
  }
}

TEST_CASE("The end of an old exchange does not move back words that a later load has raised") {
  Group group({0, 1});
  ExchangeTable table = always();
  const Joined joined = agree(table, group, 0, 4);
  group.ranks[0].layers(0).layer[0].store(5);
  joined.exchange->landed(0, 5);
  joined.exchange->landed(1, 5);
  CHECK(group.ranks[0].layers(0).layer[0].load() == 5);
  CHECK(group.ranks[1].layers(0).layer[0].load() == 4);
}

TEST_CASE("The late failure of an old load does not hide that a newer one of the slot has failed") {
  const TestRank rank(0);
  LayerFences& fences = rank.layers(1);
  fences.failed.store(6);
  fail_layers(fences, 4, 5);
  CHECK(fences.failed.load() == 6);
  CHECK(fences.layer[0].load() == 5);
  fail_layers(fences, 4, 7);
  CHECK(fences.failed.load() == 7);
  fences.failed.store(0x80000001u);  // of a load that is long gone
  fail_layers(fences, 4, 8);
  CHECK(fences.failed.load() == 8);
}

TEST_CASE("A rank that does not post in time lets the others load directly, and is told so when it comes") {
  Group group({0, 1});
  ExchangeTable table = always();
  const auto bell = std::make_shared<Doorbell>();
  const Transfer early = group.load(0);
  const auto first = table.join(early, bell);
  REQUIRE(first != nullptr);
  CHECK(group.imports[0]->exchanging[0].load());
  CHECK(table.give_up(*first, GoDirect::late));
  CHECK(first->state() == Exchange::State::given_up);
  ExchangeTable::leave(early);
  CHECK_FALSE(group.imports[0]->exchanging[0].load());
  CHECK(table.join(group.load(1), bell) == nullptr);
  CHECK(table.status().direct[static_cast<std::size_t>(GoDirect::late)] == 1);
  // The next load of the same pages is exchanged again.
  const Joined next = agree(table, group, 1, 2);
  CHECK_FALSE(table.give_up(*next.exchange, GoDirect::late));
}

TEST_CASE("Loads of the same pages that ranks post several times meet in their order") {
  Group group({0, 1});
  ExchangeTable table = always();
  const auto bell = std::make_shared<Doorbell>();
  const auto a0 = table.join(group.load(0, 0, 1), bell);
  const auto b0 = table.join(group.load(0, 1, 1), bell);
  CHECK(a0 != b0);
  const auto a1 = table.join(group.load(1, 0, 1), bell);
  CHECK(a1 == a0);
  CHECK(a0->state() == Exchange::State::agreed);
  CHECK(b0->state() == Exchange::State::gathering);
  CHECK(table.join(group.load(1, 1, 1), bell) == b0);
  CHECK(b0->state() == Exchange::State::agreed);
}

TEST_CASE("Ranks whose GPUs can't reach each other, or that ask for other host pages, load directly") {
  const auto bell = std::make_shared<Doorbell>();
  Group group({0, 1});
  ExchangeTable table = always();
  group.imports[1]->reachable = false;
  const auto unreachable = table.join(group.load(0), bell);
  CHECK(table.join(group.load(1), bell) == unreachable);
  CHECK(unreachable->state() == Exchange::State::given_up);
  group.imports[1]->reachable = true;
  const auto different = table.join(group.load(0), bell);
  Transfer other = group.load(1);
  std::swap(other.pages[0].host, other.pages[1].host);
  table.join(other, bell);
  CHECK(different->state() == Exchange::State::given_up);
  CHECK(table.status().direct[static_cast<std::size_t>(GoDirect::unreachable)] == 1);
  CHECK(table.status().direct[static_cast<std::size_t>(GoDirect::different_pages)] == 1);
}

TEST_CASE("An exchange is wanted where it saves more time than ranks wait for each other") {
  constexpr ExchangePolicy automatic{MlaLoad::automatic, 5'000'000};
  constexpr ExchangePolicy forced{MlaLoad::exchange, 5'000'000};
  constexpr ExchangePolicy direct{MlaLoad::direct, 5'000'000};
  CHECK(automatic.wants(256 * kMiB, 2));
  CHECK_FALSE(automatic.wants(64 * kKiB, 2));
  CHECK(forced.wants(64 * kKiB, 2));
  CHECK_FALSE(forced.wants(256 * kMiB, 1));
  CHECK_FALSE(direct.wants(256 * kMiB, 2));
  // Never longer than what it could win.
  CHECK(automatic.patience_ns(8 * kMiB, 2) < 100'000);
  CHECK(automatic.patience_ns(8 * kGiB, 2) == 5'000'000);
  CHECK(forced.patience_ns(64 * kKiB, 2) == 5'000'000);

  Group group({0, 1});
  const ExchangeTable off(forced, "the daemon sees one GPU");
  CHECK_FALSE(off.wants(group.load(0)));
  const ExchangeTable on(forced, "");
  CHECK(on.wants(group.load(0)));
  Transfer alone = group.load(0);
  alone.group.reset();
  CHECK_FALSE(on.wants(alone));
}

}  // namespace hicache::daemon
