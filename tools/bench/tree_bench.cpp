#include "tools/bench/tree_bench.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "shm/clock.hpp"
#include "tools/bench/bench_model.hpp"
#include "tools/bench/machine.hpp"
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
  struct Eviction {
    double device_us = 0;
    double host_us = 0;
  };
  // Takes 1,000 leaves off the device and then off the host, and puts others in their place.
  Eviction evict() {
    const std::uint64_t start = monotonic_ns();
    const std::uint64_t device = tree_.evict(kEvictedPages);
    const std::uint64_t middle = monotonic_ns();
    const std::uint64_t host = tree_.evict_host(kEvictedPages);
    const std::uint64_t end = monotonic_ns();
    for (std::uint64_t i = 0; i < kEvictedPages; ++i) add_leaf();
    if (device != kEvictedPages || host != kEvictedPages) return {};
    return {static_cast<double>(middle - start) / 1e3, static_cast<double>(end - middle) / 1e3};
  }

 private:
  static PrefixTreeOptions options() {
    PrefixTreeOptions o;
    o.page_tokens = 1;
    return o;
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

Json costs() {
  Json list = Json::array();
  fmt::print("cost of the prefix tree by its leaves (medians of {})\n", kRounds);
  for (const std::uint64_t leaves : {1'000u, 10'000u, 100'000u}) {
    LeafyTree tree(leaves);
    std::vector<double> match;
    std::vector<double> device;
    std::vector<double> host;
    for (int round = 0; round < kRounds; ++round) {
      match.push_back(tree.match());
      const auto eviction = tree.evict();
      device.push_back(eviction.device_us);
      host.push_back(eviction.host_us);
    }
    fmt::print(
        "  {:>7} leaves: match of {} pages {:.0f} us, eviction of {} pages: device {:.0f} us, host "
        "{:.0f} us\n",
        leaves, kPrefixPages, median(match), kEvictedPages, median(device), median(host));
    list.push_back({{"leaves", leaves},
                    {"match_us", median(match)},
                    {"evict_device_us", median(device)},
                    {"evict_host_us", median(host)}});
  }
  return list;
}

Result<Json> hit_rates(const TreeBenchOptions& options) {
  const auto blocks = read_trace_file(options.trace, options.limit);
  if (!blocks) return blocks.error();
  const Workload workload = Workload::from_blocks(*blocks, kPageTokens);
  fmt::print("hits of {} requests for {} pages, by host pages and policy\n", workload.size(),
             workload.pages());
  constexpr std::pair<TreePolicy, const char*> kPolicies[] = {
      {TreePolicy::lru, "lru"}, {TreePolicy::lfu, "lfu"}, {TreePolicy::scan_resistant, "scan_resistant"}};
  Json list = Json::array();
  for (const std::uint64_t pages : {1'000u, 10'000u, 50'000u}) {
    Json row{{"pages", pages}};
    fmt::print("  {:>6} pages:", pages);
    for (const auto& [policy, name] : kPolicies) {
      const auto hits = replay_on_tree(workload, pages, policy);
      if (!hits) return hits.error();
      const double rate = static_cast<double>(*hits) / static_cast<double>(workload.pages());
      fmt::print("  {} {} ({:.1f} %)", name, *hits, 100 * rate);
      row[name] = {{"hits", *hits}, {"hit_rate", rate}};
    }
    fmt::print("\n");
    list.push_back(std::move(row));
  }
  return list;
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
