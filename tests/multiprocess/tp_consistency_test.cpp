// Ranks decide alike without asking each other: groups of DP attention, pipeline stages, several engines at
// once, ranks that come in any order, late, or not any more. Each rank is a process; what each decided is
// compared word by word.
#include <algorithm>
#include <array>
#include <csignal>
#include <functional>
#include <random>
#include <sstream>

#include "tests/support/catch.hpp"
#include "tests/support/controller_rank.hpp"
#include "tests/support/rank_group.hpp"

namespace hicache::test {
namespace {

// A scheduler that serves random requests. Two with the same seed make the same calls.
class Scheduler {
 public:
  Scheduler(ControllerRank& rank, unsigned seed) : r_(rank), random_(seed) {}

  // One scheduling step; what was decided in it.
  std::string step() {
    std::ostringstream said;
    for (const HiCacheAck& ack : TestRank::take(r_.controller->check_events())) {
      said << " ack " << ack.node_ids[0] << ' ' << to_string(ack.status) << ' ' << ack.host_tokens;
      r_.tree->apply(ack);
    }
    const auto hashes = prompt(pick(4), 1 + pick(6));
    if (pick(3) == 0) said << " adopt " << TestRank::take(r_.tree->adopt(hashes));
    auto found = r_.tree->match(hashes);
    said << " match " << found.device_slots.size() << '+' << found.host_tokens;
    if (found.host_tokens > 0) load(hashes, found, said);
    if (!r_.holds(found.device_slots, hashes)) throw std::logic_error("a matched page holds something else");
    const auto fresh = std::span(hashes).subspan(found.device_slots.size() / r_.page_tokens);
    TestRank::take(r_.tree->lock(found.device_node));
    const std::uint64_t wanted = fresh.size() * r_.page_tokens;
    if (r_.device->available() < wanted) r_.tree->evict(wanted - r_.device->available());
    if (r_.device->available() >= wanted) {
      auto slots = r_.compute(fresh);
      slots.insert(slots.begin(), found.device_slots.begin(), found.device_slots.end());
      const auto inserted = TestRank::take(r_.tree->insert(hashes, slots));
      said << " insert " << inserted.node << ' ' << inserted.matched_tokens;
      TestRank::take(r_.device->free(inserted.duplicates));
    }
    TestRank::take(r_.tree->unlock(found.device_node));
    if (pick(4) == 0) said << " evict " << r_.tree->evict(4 * (1 + pick(12)));
    if (const std::string wrong = r_.tree->check(); !wrong.empty()) throw std::logic_error(wrong);
    return said.str() + "\n";
  }
  // A load, which random steps in a small pool may not come to. Precondition: no rank has done anything else.
  std::string load_for_certain() {
    std::ostringstream said;
    const auto hashes = prompt(7, 2);
    TestRank::take(r_.tree->insert(hashes, r_.compute(hashes)));
    r_.tree->apply(r_.acks(1));
    r_.tree->evict(r_.device->size());
    auto found = r_.tree->match(hashes);
    load(hashes, found, said);
    return said.str() + "\n";
  }
  // Ends what is in flight: every page that was written can be found now.
  void settle() { r_.tree->apply(TestRank::take(r_.controller->drain())); }

 private:
  std::uint32_t pick(std::uint32_t n) { return static_cast<std::uint32_t>(random_() % n); }

  void load(std::span<const PrefixHash> hashes, PrefixMatch& found, std::ostringstream& said) {
    const auto back = r_.tree->load_back(found.host_node, 1000);
    said << " load " << to_string(back.status());
    if (!back) return;
    said << ' ' << back->device_slots.size();
    r_.spoil(back->device_slots);
    const auto consumer = TestRank::take(r_.controller->start_loading());
    TestRank::take(r_.controller->layer_counter().set_consumer(consumer));
    TestRank::take(r_.controller->layer_counter().wait_until(1, kPatienceMs));
    if (!r_.holds(back->device_slots, hashes.subspan(found.device_slots.size() / r_.page_tokens))) {
      throw std::logic_error("a loaded page holds something else");
    }
    found.device_slots.insert(found.device_slots.end(), back->device_slots.begin(), back->device_slots.end());
    found.device_node = back->node;
  }

  ControllerRank& r_;
  std::mt19937 random_;
};

PrefixTreeOptions tree_options() {
  PrefixTreeOptions options;
  options.load_back_threshold = 4;
  return options;
}

void nap_us(std::uint64_t us) {
  std::this_thread::sleep_for(std::chrono::microseconds(us));
}

bool said_somewhere(const std::string& text, const std::string& what) {
  return text.find(what) != std::string::npos;
}

// One group whose ranks have schedulers of the same seed. `steps(rank, scheduler)` takes the steps and
// returns what was decided; all that was in flight ends behind it.
std::vector<std::string> run_schedulers(const TestDaemon& daemon, const NamespaceSpec& spec, Gate& gate,
                                        unsigned seed,
                                        const std::function<std::string(std::uint32_t, Scheduler&)>& steps) {
  return run_ranks(spec.tp_size, [&](std::uint32_t rank) {
    ControllerRank r(daemon, rank, spec, tree_options());
    const LeaveTogether leave(gate, spec.tp_size);
    gate.meet(spec.tp_size);
    Scheduler scheduler(r, seed);
    const std::string text = steps(rank, scheduler);
    if (!said_somewhere(text, "failed")) scheduler.settle();
    return text;
  });
}

void require_alike(const std::vector<std::string>& said) {
  INFO(said[0].substr(0, 300));
  for (const std::string& one : said) {
    CHECK_FALSE(said_somewhere(one, "failed"));
    const bool alike = one == said[0];
    CHECK(alike);
  }
}

}  // namespace

TEST_CASE("two engines at once, each with two DP attention groups: every group's ranks decide alike") {
  constexpr std::uint32_t kRanks = 2;
  constexpr std::uint32_t kGroups = 4;  // engine a: 0 and 1, engine b: 2 and 3
  constexpr std::uint32_t kSteps = 150;
  const TestDaemon daemon(
      R"({"pool": {"max_pages": 12}, "eviction": {"high_watermark": 0, "low_watermark": 0}})");
  // MLA: all groups of both engines share one copy of every page, in a pool too small for what they ask.
  const NamespaceSpec spec = small_spec(Attention::mla, kRanks);
  const Shared<Gate> gate;
  const unsigned seed = std::random_device{}();
  INFO("seed " << seed);
  const auto said = run_ranks(kGroups * kRanks, [&](std::uint32_t process) {
    const std::uint32_t group = process / kRanks;
    const std::string engine = std::string(group / 2 == 0 ? "a" : "b") + ".dp" + std::to_string(group % 2);
    ControllerRank r(daemon, process % kRanks, spec, tree_options(), 0, 4096, engine);
    const LeaveTogether leave(*gate, kGroups * kRanks);
    gate->meet(kGroups * kRanks);
    Scheduler scheduler(r, seed + group);
    std::mt19937 noise(seed ^ (process * 7919));
    std::string text;
    if (group == 0) text += scheduler.load_for_certain();
    gate->meet(2 * kGroups * kRanks);
    for (std::uint32_t step = 0; step < kSteps; ++step) {
      if (noise() % 8 == 0) nap_us(noise() % 1500);
      text += scheduler.step();
    }
    scheduler.settle();
    return text;
  });
  for (std::uint32_t group = 0; group < kGroups; ++group) {
    INFO("group " << group << ": " << said[group * kRanks].substr(0, 300));
    CHECK_FALSE(said_somewhere(said[group * kRanks], "failed"));
    const bool alike = said[group * kRanks] == said[group * kRanks + 1];
    CHECK(alike);
  }
  CHECK(said_somewhere(said[0], "load ok"));
  require_clean(daemon);
}

TEST_CASE(
    "pipeline stages have a namespace each: the ranks of a stage decide alike, and see no page of another "
    "stage") {
  constexpr std::uint32_t kRanks = 2;
  constexpr std::uint32_t kSteps = 100;
  const TestDaemon daemon;
  const auto stage_spec = [](std::uint32_t stage) {
    NamespaceSpec spec = small_spec(Attention::mha, kRanks);
    spec.first_layer = stage * spec.layers;
    return spec;
  };
  const Shared<Gate> gate;
  const unsigned seed = std::random_device{}();
  INFO("seed " << seed);
  const auto said = run_ranks(2 * kRanks, [&](std::uint32_t process) {
    const std::uint32_t stage = process / kRanks;
    ControllerRank r(daemon, process % kRanks, stage_spec(stage), tree_options());
    const LeaveTogether leave(*gate, 2 * kRanks);
    gate->meet(2 * kRanks);
    std::string text;
    const auto only_stage_0 = prompt(90, 3);
    if (stage == 0) {
      TestRank::take(r.tree->insert(only_stage_0, r.compute(only_stage_0)));
      r.tree->apply(r.acks(1));
      gate->step.fetch_add(1);
    }
    // What one stage has written is a miss for the other.
    eventually([&] { return gate->step.load() == kRanks; });
    if (stage == 1) text += "adopted " + std::to_string(TestRank::take(r.tree->adopt(only_stage_0))) + "\n";
    r.tree->evict(1000);
    r.tree->reset();
    TestRank::take(r.controller->reset());
    Scheduler scheduler(r, seed);
    for (std::uint32_t step = 0; step < kSteps; ++step) {
      if (stage == 1) nap_us(100);  // the later stage works on what the earlier one did some time ago
      text += scheduler.step();
    }
    scheduler.settle();
    return text;
  });
  INFO(said[0].substr(0, 300));
  CHECK_FALSE(said_somewhere(said[0], "failed"));
  CHECK((said[0] == said[1] && said[2] == said[3]));
  CHECK(said[2].find("adopted 0\n") == 0);
  require_clean(daemon);
}

TEST_CASE(
    "ranks that come strictly one after the other, each step in another order, decide alike and never wait") {
  constexpr std::uint32_t kRanks = 4;
  constexpr std::uint32_t kSteps = 80;
  const TestDaemon daemon;
  const NamespaceSpec spec = small_spec(Attention::mha, kRanks);
  const Shared<Gate> gate;
  const unsigned seed = std::random_device{}();
  INFO("seed " << seed);
  const auto said = run_schedulers(daemon, spec, *gate, seed, [&](std::uint32_t rank, Scheduler& scheduler) {
    std::string text = scheduler.load_for_certain();
    gate->meet(2 * kRanks);
    for (std::uint32_t step = 0; step < kSteps; ++step) {
      // A permutation of its own for each step, the same for all.
      std::array<std::uint32_t, kRanks> order{};
      for (std::uint32_t i = 0; i < kRanks; ++i) order[i] = i;
      std::shuffle(order.begin(), order.end(), std::mt19937(seed ^ step));
      const auto place =
          static_cast<std::uint32_t>(std::find(order.begin(), order.end(), rank) - order.begin());
      if (!eventually([&] { return gate->step.load() == step * kRanks + place; }))
        return text + "failed: turn";
      text += scheduler.step();
      gate->step.fetch_add(1);
    }
    return text;
  });
  require_alike(said);
  CHECK(said_somewhere(said[0], "load ok"));
  require_clean(daemon);
}

TEST_CASE("a rank that is late by many steps gets the answers that the others got") {
  constexpr std::uint32_t kRanks = 3;
  constexpr std::uint32_t kSteps = 40;
  const TestDaemon daemon;
  const NamespaceSpec spec = small_spec(Attention::mla, kRanks);
  const Shared<Gate> gate;
  const unsigned seed = std::random_device{}();
  INFO("seed " << seed);
  const auto said = run_schedulers(daemon, spec, *gate, seed, [&](std::uint32_t rank, Scheduler& scheduler) {
    std::string text;
    for (std::uint32_t step = 0; step < kSteps; ++step) {
      // Rank 2 begins step n when the others have done n + 8 steps, as far as there are so many.
      if (rank == 2 && !eventually([&] { return gate->step.load() >= 2 * std::min(step + 8, kSteps); })) {
        return text + "failed: the others wait";
      }
      text += scheduler.step();
      if (rank != 2) gate->step.fetch_add(1);
    }
    return text;
  });
  require_alike(said);
  require_clean(daemon);
}

TEST_CASE("after a rank was killed at a random moment the engine goes on as a new group with its pages") {
  constexpr std::uint32_t kRanks = 3;
  const TestDaemon daemon;
  const NamespaceSpec spec = small_spec(Attention::mha, kRanks);
  const unsigned seed = std::random_device{}();
  INFO("seed " << seed);
  const std::uint32_t doomed = seed % kRanks;
  const std::uint32_t dies_at = 20 + seed % 60;
  {
    const Shared<Gate> gate;
    const auto said = run_ranks(kRanks, [&](std::uint32_t rank) -> std::string {
      ControllerRank r(daemon, rank, spec, tree_options(), 0, 4096, "first life");
      gate->meet(kRanks);
      // What the random steps may not come to before the death: a prompt that is in the pool for certain.
      const auto kept = prompt(0, 6);
      TestRank::take(r.tree->insert(kept, r.compute(kept)));
      r.tree->apply(r.acks(1));
      gate->meet(2 * kRanks);
      Scheduler scheduler(r, seed);
      try {
        for (std::uint32_t step = 0; step < 100'000; ++step) {
          if (rank == doomed && step == dies_at) ::kill(::getpid(), SIGKILL);
          scheduler.step();
        }
      } catch (const std::runtime_error& e) {
        r.tree->reset();
        TestRank::take(r.controller->reset());
        const LeaveTogether leave(*gate, kRanks - 1);
        const bool whole = r.device->available() == r.device->size();
        return std::string(whole ? "whole, " : "slots are lost, ") + e.what();
      }
      return "nobody died";
    });
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      INFO("rank " << rank << ": " << said[rank]);
      if (rank != doomed) CHECK(said[rank].find("whole, peer_lost") == 0);
    }
  }
  const Shared<Gate> gate;
  const auto said = run_ranks(kRanks, [&](std::uint32_t rank) {
    ControllerRank r(daemon, rank, spec, tree_options(), 0, 4096, "second life");
    const LeaveTogether leave(*gate, kRanks);
    gate->meet(kRanks);
    std::uint64_t adopted = 0;
    for (std::uint32_t id = 0; id < 4; ++id) adopted += TestRank::take(r.tree->adopt(prompt(id, 6)));
    std::string text = "adopted " + std::to_string(adopted) + "\n";
    Scheduler scheduler(r, seed);
    for (std::uint32_t step = 0; step < 50; ++step) text += scheduler.step();
    scheduler.settle();
    return text;
  });
  require_alike(said);
  CHECK_FALSE(said_somewhere(said[0], "adopted 0\n"));
  require_clean(daemon);
}

}  // namespace hicache::test
