#include "tools/bench/tree_bench.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <vector>

#include "shm/clock.hpp"
#include "tools/bench/bench_model.hpp"
#include "tools/bench/machine.hpp"
#include "tools/bench/policy_rates.hpp"
#include "tools/bench/tree_replay.hpp"

namespace hicache::bench {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kEvictedPages = 1000;
constexpr std::uint64_t kPrefixPages = 1000;
constexpr int kRounds = 15;

PrefixHash random_hash(std::mt19937_64& random) {
  PrefixHash hash;
  for (std::uint64_t& word : hash.words) word = random();
  return hash;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// A tree with so many leaves of one page, on the device and on the host, and one prefix of 1,000 pages in
// nodes of ten.
class LeafyTree {
 public:
  explicit LeafyTree(std::uint64_t leaves)
      : tier_(leaves + 3 * kPrefixPages, leaves + 3 * kPrefixPages), tree_(options(), tier_) {
    for (std::uint64_t i = 0; i < kPrefixPages; ++i) prefix_.push_back(random_hash(random_));
    for (std::size_t end = 10; end <= kPrefixPages; end += 10) insert(std::span(prefix_).first(end));
    for (std::uint64_t i = 0; i < leaves; ++i) add_leaf();
  }

  // Microseconds.
  double match() {
    const std::uint64_t start = monotonic_ns();
    const PrefixMatch found = tree_.match(prefix_);
    const std::uint64_t end = monotonic_ns();
    return found.device_slots.size() == kPrefixPages ? static_cast<double>(end - start) / 1e3 : 0;
  }
  // Takes 1,000 leaves off the device.
  double evict_device() {
    return timed([&] { return tree_.evict(kEvictedPages); });
  }
  // Takes the same leaves off the host.
  double evict_host() {
    return timed([&] { return tree_.evict_host(kEvictedPages); });
  }
  // Puts others in their place.
  void refill() {
    for (std::uint64_t i = 0; i < kEvictedPages; ++i) add_leaf();
  }

 private:
  static PrefixTreeOptions options() {
    PrefixTreeOptions o;
    o.page_tokens = 1;
    return o;
  }
  template <class Evict>
  static double timed(Evict&& evict) {
    const std::uint64_t start = monotonic_ns();
    const std::uint64_t evicted = evict();
    const std::uint64_t end = monotonic_ns();
    return evicted == kEvictedPages ? static_cast<double>(end - start) / 1e3 : 0;
  }
  void insert(std::span<const PrefixHash> hashes) {
    auto slots = tree_.match(hashes).device_slots;
    const auto fresh = tier_.take_device(hashes.size() - slots.size());
    slots.insert(slots.end(), fresh->begin(), fresh->end());
    static_cast<void>(tree_.insert(hashes, slots));
    tree_.apply(tier_.acks());
  }
  void add_leaf() {
    const PrefixHash leaf = random_hash(random_);
    insert({&leaf, 1});
  }

  std::mt19937_64 random_{1};
  std::vector<PrefixHash> prefix_;
  SlotTier tier_;
  PrefixTree tree_;
};

// What the memory under a tree costs: as many nodes as the tree has leaves, visited one after the other in
// random order, each visit an access that the next one waits for.
class RandomNodes {
 public:
  explicit RandomNodes(std::uint64_t nodes) : nodes_(nodes) {
    std::vector<std::uint32_t> order(nodes);
    std::iota(order.begin(), order.end(), 0u);
    std::shuffle(order.begin(), order.end(), std::mt19937_64(2));
    for (std::size_t i = 0; i < order.size(); ++i) nodes_[order[i]].next = order[(i + 1) % order.size()];
  }
  // Microseconds for so many visits.
  double visit(std::uint64_t count) {
    const std::uint64_t start = monotonic_ns();
    for (std::uint64_t i = 0; i < count; ++i) at_ = nodes_[at_].next;
    const std::uint64_t end = monotonic_ns();
    sink_ = at_;
    return static_cast<double>(end - start) / 1e3;
  }

 private:
  struct alignas(kCacheLine) Node {  // about what a leaf takes with its lists
    std::uint32_t next = 0;
    std::array<std::uint8_t, 5 * kCacheLine> rest{};
  };
  std::vector<Node> nodes_;
  std::uint32_t at_ = 0;
  volatile std::uint32_t sink_ = 0;  // so that the visits are not optimised away
};

// Reads and writes more than any cache holds: what is measured next finds its memory in none.
void empty_caches() {
  static std::vector<std::uint64_t> filler(std::size_t{96} * kMiB / sizeof(std::uint64_t));
  for (std::size_t i = 0; i < filler.size(); i += kCacheLine / sizeof(std::uint64_t)) ++filler[i];
}

Json costs() {
  Json list = Json::array();
  fmt::print(
      "cost of the prefix tree by its leaves, in us, as the caches were left and with empty caches (medians "
      "of "
      "{})\n  {:>8} {:>20} {:>20} {:>20} {:>20}\n",
      kRounds, "leaves", fmt::format("match {} pages", kPrefixPages),
      fmt::format("evict {}, device", kEvictedPages), fmt::format("evict {}, host", kEvictedPages),
      fmt::format("visit {} nodes", kEvictedPages));
  for (const std::uint64_t leaves : {1'000u, 10'000u, 100'000u}) {
    LeafyTree tree(leaves);
    RandomNodes nodes(leaves);
    Json row{{"leaves", leaves}};
    std::array<std::array<double, 2>, 4> shown{};
    for (const bool empty : {false, true}) {
      std::array<std::vector<double>, 4> times;  // match, device, host, visits
      const auto measure = [&](std::size_t which, auto&& one) {
        if (empty) empty_caches();
        times[which].push_back(one());
      };
      for (int round = 0; round < kRounds; ++round) {
        measure(0, [&] { return tree.match(); });
        measure(1, [&] { return tree.evict_device(); });
        measure(2, [&] { return tree.evict_host(); });
        tree.refill();
        measure(3, [&] { return nodes.visit(kEvictedPages); });
      }
      constexpr const char* kNames[] = {"match", "evict_device", "evict_host", "visit"};
      for (std::size_t i = 0; i < times.size(); ++i) {
        shown[i][empty ? 1 : 0] = median(times[i]);
        row[fmt::format("{}_{}us", kNames[i], empty ? "empty_caches_" : "")] = median(times[i]);
      }
    }
    fmt::print("  {:>8}", leaves);
    for (const auto& [warm, cold] : shown) fmt::print(" {:>20}", fmt::format("{:.0f} / {:.0f}", warm, cold));
    fmt::print("\n");
    list.push_back(std::move(row));
  }
  return list;
}

Result<Json> hit_rates(const TreeBenchOptions& options) {
  const auto blocks = read_trace_file(options.trace, options.limit);
  if (!blocks) return blocks.error();
  const Workload workload = Workload::from_blocks(*blocks, kPageTokens);
  const auto rows = compare_policies(workload);
  if (!rows) return rows.error();
  fmt::print("{} requests for {} pages\n{}", workload.size(), workload.pages(),
             policy_text(*rows, workload.pages()));
  return policy_json(*rows, workload.pages());
}

}  // namespace

Result<Json> run_tree_bench(const TreeBenchOptions& options) {
  Json json{{"machine", Machine::here().json()}, {"costs", costs()}};
  if (!options.trace.empty()) {
    auto rates = hit_rates(options);
    if (!rates) return rates.error();
    json["policies"] = std::move(*rates);
  }
  return json;
}

}  // namespace hicache::bench
