// Hybrid models: a page made of KV and side pools, which is visible with all of them or not at all, and hits
// that must end with a page that carries states.
#include <map>

#include "tests/support/catch.hpp"
#include "tests/support/controller_rank.hpp"
#include "tests/support/rank_group.hpp"

namespace hicache::test {
namespace {

NamespaceSpec hybrid_spec(std::uint32_t tp_size, bool states) {
  NamespaceSpec spec = small_spec(Attention::mha, tp_size);
  spec.side_pools.push_back({"indexer", HitRule::all_pages, spec.layers, 72});
  if (states) spec.side_pools.push_back({"mamba", HitRule::trailing_pages, 3, 4104});
  return spec;
}

std::vector<DevicePage> slots(std::initializer_list<int> list) {
  std::vector<DevicePage> out;
  for (const int slot : list)
    out.push_back(slot < 0 ? DevicePage{} : DevicePage{static_cast<std::uint32_t>(slot)});
  return out;
}

struct OneRank {
  OneRank() : rank(daemon, "engine", 0, hybrid_spec(1, true)) {}
  // Writes a prompt with the states of some pages in the slots given.
  void write(const std::vector<PrefixHash>& hashes, const std::vector<DevicePage>& states) {
    const auto reserved = rank.run(rank.session().reserve(++sequence, hashes));
    REQUIRE(reserved.status == Status::ok);
    const auto pages = TestRank::pages(0, static_cast<std::uint32_t>(hashes.size()));
    for (std::size_t i = 0; i < hashes.size(); ++i) {
      rank.fill(pages[i], hashes[i]);
      if (states[i]) rank.fill_state(states[i], hashes[i]);
    }
    const auto written = rank.run(rank.session().write(reserved.lease, 0, pages, std::nullopt, 0, states));
    REQUIRE(written.status == Status::ok);
    rank.run(rank.session().release(reserved.lease));
  }
  OperationResult reserve(const std::vector<PrefixHash>& hashes) {
    return rank.run(rank.session().reserve(++sequence, hashes));
  }

  TestDaemon daemon;
  TestRank rank;
  std::uint64_t sequence = 0;
};

// State slots that a test engine hands to its controller: one for each page that has a state.
class EngineStates : public StateSlots {
 public:
  DevicePage source(const PrefixHash& page) override {
    const auto at = kept.find(page.words);
    return at == kept.end() ? DevicePage{} : at->second;
  }
  DevicePage target(const PrefixHash& page) override {
    last = page;
    return DevicePage{63};
  }
  std::map<std::array<std::uint64_t, 4>, DevicePage> kept;
  PrefixHash last;
};

}  // namespace

TEST_CASE(
    "a page of several pools becomes visible when all ranks have written all of them, and comes back whole") {
  const TestDaemon daemon;
  const NamespaceSpec spec = hybrid_spec(2, false);
  const Shared<Gate> gate;
  const auto hashes = prompt(1, 4);
  const auto said = run_ranks(2, [&](std::uint32_t tp_rank) {
    TestRank rank(daemon, "engine", tp_rank, spec);
    const LeaveTogether leave(*gate, 2);
    gate->meet(2);
    const auto reserved = rank.run(rank.session().reserve(1, hashes));
    const auto pages = TestRank::pages(0, 4);
    for (std::uint32_t i = 0; i < 4; ++i) rank.fill(pages[i], hashes[i]);
    std::string text;
    if (tp_rank == 1) {
      eventually([&] { return gate->step.load() == 1; });
      text += "before " + std::to_string(rank.session().probe(hashes).leading) + "\n";
    }
    const auto ticket = TestRank::take(rank.session().write(reserved.lease, 0, pages));
    gate->step.store(1);
    const auto written = TestRank::take(rank.session().wait(ticket, kPatienceMs));
    text += "written " + std::to_string(written.written) + " probe " +
            std::to_string(rank.session().probe(hashes).leading);
    for (const DevicePage page : pages) rank.spoil(page);
    const auto loaded = rank.run(rank.session().load(reserved.lease, 0, pages));
    bool right = loaded.status == Status::ok && loaded.bytes == 4 * spec.shard_bytes();
    for (std::uint32_t i = 0; i < 4; ++i) right = right && rank.holds(pages[i], hashes[i]);
    rank.run(rank.session().release(reserved.lease));
    return text + (right ? " right" : " wrong");
  });
  CHECK(said[0] == "written 4 probe 4 right");
  CHECK(said[1] == "before 0\nwritten 4 probe 4 right");
  require_clean(daemon);
}

TEST_CASE("all_pages and trailing_pages: a hit ends with the last page that carries states") {
  OneRank one;
  const auto hashes = prompt(2, 6);
  one.write(hashes, slots({-1, -1, 7, -1, -1, 9}));
  const auto leading = [&](std::size_t count) {
    return one.rank.session().probe(std::span(hashes).first(count)).leading;
  };
  CHECK(leading(2) == 0);
  CHECK(leading(3) == 3);
  CHECK(leading(5) == 3);
  CHECK(leading(6) == 6);
  const auto none = one.reserve(prompt(2, 2));
  CHECK((none.hits == 0 && none.present == 2));
  const auto some = one.reserve(prompt(2, 5));
  CHECK((some.hits == 3 && some.present == 5));

  for (std::uint32_t i = 0; i < 3; ++i) one.rank.spoil(DevicePage{20 + i});
  one.rank.spoil_state(DevicePage{30});
  const auto pages = TestRank::pages(20, 3);
  const auto loaded =
      one.rank.run(one.rank.session().load(some.lease, 0, pages, LayerFence{0, 1}, 0, slots({-1, -1, 30})));
  REQUIRE(loaded.status == Status::ok);
  for (std::uint32_t i = 0; i < 3; ++i) CHECK(one.rank.holds(DevicePage{20 + i}, hashes[i]));
  CHECK(one.rank.holds_state(DevicePage{30}, hashes[2]));
  const std::uint64_t pages_bytes = 3 * (hybrid_spec(1, false).shard_bytes());
  CHECK(loaded.bytes == pages_bytes + 3 * 4104);  // KV and indexer of three pages, the states of one
  // States that a page does not carry can't be loaded, nor what a hit does not hold.
  CHECK(one.rank.run(one.rank.session().load(some.lease, 0, pages, std::nullopt, 0, slots({-1, 30, -1})))
            .status == Status::not_found);
  require_clean(one.daemon);
}

TEST_CASE("state slots that nobody registered are refused by name") {
  OneRank one;
  const auto reserved = one.reserve(prompt(3, 2));
  const auto pages = TestRank::pages(0, 2);
  const auto refused = one.rank.session().write(reserved.lease, 0, pages, std::nullopt, 0, slots({-1, 64}));
  CHECK(refused.status() == Status::invalid_argument);
  CHECK(refused.error().message == "state slot 64 is not below the registered 64 slots");
  CHECK(one.rank.session().write(reserved.lease, 0, pages, std::nullopt, 0, slots({1})).status() ==
        Status::invalid_argument);
  TestRank plain(one.daemon, "plain", 0, small_spec(Attention::mha, 1));
  const auto lease = plain.run(plain.session().reserve(1, prompt(3, 2))).lease;
  CHECK(plain.session().write(lease, 0, pages, std::nullopt, 0, slots({-1, 0})).status() ==
        Status::invalid_argument);
}

TEST_CASE("ranks that write states of different pages diverge, and nothing of it is published") {
  const TestDaemon daemon;
  const NamespaceSpec spec = hybrid_spec(2, true);
  const Shared<Gate> gate;
  const auto hashes = prompt(4, 2);
  const auto said = run_ranks(2, [&](std::uint32_t tp_rank) {
    TestRank rank(daemon, "engine", tp_rank, spec);
    const LeaveTogether leave(*gate, 2);
    gate->meet(2);
    const auto reserved = rank.run(rank.session().reserve(1, hashes));
    if (tp_rank == 1) eventually([&] { return gate->step.load() == 1; });
    const auto ticket =
        TestRank::take(rank.session().write(reserved.lease, 0, TestRank::pages(0, 2), std::nullopt, 0,
                                            tp_rank == 0 ? slots({-1, 3}) : slots({3, -1})));
    if (tp_rank == 0) {
      // The other one asks only after this one's operation was decided.
      rank.run(rank.session().nop());
      gate->step.store(1);
    }
    const auto ended = TestRank::take(rank.session().wait(ticket, kPatienceMs));
    rank.run(rank.session().release(reserved.lease));
    return std::string(to_string(ended.status)) + " " + std::to_string(rank.session().probe(hashes).leading);
  });
  CHECK(said[0] == "poisoned 0");
  CHECK(said[1] == "diverged 0");
  require_clean(daemon);
}

TEST_CASE("a controller writes the states that its engine kept, and loads those of the last page") {
  const TestDaemon daemon;
  EngineStates states;
  NamespaceSpec spec = hybrid_spec(1, true);
  TestRank rank(daemon, "engine", 0, spec);
  auto device = TestRank::take(TokenSlots::create(64 * 4, 4));
  ControllerOptions options;
  options.spec = spec;
  options.host_tokens = 256;
  const auto without = HiCacheController::create(rank.session(), *device, options);
  CHECK(without.status() == Status::invalid_argument);
  options.states = &states;
  auto controller = TestRank::take(HiCacheController::create(rank.session(), *device, options));
  PrefixTreeOptions tree_options;
  tree_options.page_tokens = 4;
  tree_options.load_back_threshold = 4;
  PrefixTree tree(tree_options, *controller);

  const auto hashes = prompt(5, 6);
  states.kept[hashes[2].words] = DevicePage{10};
  states.kept[hashes[5].words] = DevicePage{11};
  rank.fill_state(DevicePage{10}, hashes[2]);
  rank.fill_state(DevicePage{11}, hashes[5]);
  const auto given = TestRank::take(device->alloc(24));
  for (std::uint32_t i = 0; i < 6; ++i)
    rank.fill(DevicePage{static_cast<std::uint32_t>(given[4 * i] / 4)}, hashes[i]);
  REQUIRE(tree.insert(hashes, given).ok());
  tree.apply(TestRank::take(controller->drain()));
  CHECK(tree.evict(24) == 24);

  const auto load = [&](std::size_t count) {
    rank.spoil_state(DevicePage{63});
    const auto found = tree.match(std::span(hashes).first(count));
    auto back = tree.load_back(found.host_node, 1000);
    if (!back) return std::string(to_string(back.status()));
    for (std::size_t at = 0; at < back->device_slots.size(); at += 4) {
      rank.spoil(DevicePage{static_cast<std::uint32_t>(back->device_slots[at] / 4)});
    }
    REQUIRE(*controller->start_loading() >= 0);
    tree.apply(TestRank::take(controller->drain()));
    const std::size_t first = found.device_slots.size() / 4;
    bool right = rank.holds_state(DevicePage{63}, states.last);
    for (std::size_t i = 0; i < back->device_slots.size() / 4; ++i) {
      const DevicePage page{static_cast<std::uint32_t>(back->device_slots[4 * i] / 4)};
      right = right && rank.holds(page, hashes[first + i]);
    }
    return std::to_string(back->device_slots.size()) + (right ? " right" : " wrong");
  };
  // Five pages are there, but only three of them can be continued. The other ones stay for a longer prompt.
  CHECK(load(2) == "not_found");
  CHECK(load(5) == "12 right");
  CHECK(tree.check() == "");
  CHECK(tree.host_tokens() == 24);
  CHECK(load(6) == "12 right");
  CHECK(states.last == hashes[5]);
  CHECK(tree.check() == "");
  require_clean(daemon);
}

}  // namespace hicache::test
