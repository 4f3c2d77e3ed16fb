// The parts of hicache-bench whose errors would make its figures lie: pattern, trace, conversations, keys,
// histogram.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <vector>

#include "shm/prefix_hash.hpp"
#include "tests/support/catch.hpp"
#include "tools/bench/bench_model.hpp"
#include "tools/bench/conversations.hpp"
#include "tools/bench/latency_histogram.hpp"
#include "tools/bench/page_pattern.hpp"
#include "tools/bench/trace_reader.hpp"
#include "tools/bench/tree_replay.hpp"
#include "tools/bench/workload.hpp"

using namespace hicache;
using namespace hicache::bench;

namespace {

PrefixHash hash_of(std::uint64_t n) {
  return PrefixHash{{n, n + 1, n + 2, n + 3}};
}

std::vector<std::uint8_t> filled(std::size_t bytes, std::uint64_t base) {
  std::vector<std::uint8_t> piece(bytes);
  fill_piece(piece, base);
  return piece;
}

bool within_a_percent(double value, double expected) {
  return std::abs(value - expected) <= expected * 0.01;
}

}  // namespace

TEST_CASE("a filled piece has the pattern's words and no wrong one, whatever its size") {
  for (const std::size_t words : {1u, 7u, 8u, 9u, 64u, 255u, 256u}) {
    const auto piece = filled(words * 8, 77);
    CHECK(count_wrong_words(piece, 77) == 0);
    for (std::size_t i = 0; i < words; ++i) {
      std::uint64_t word = 0;
      std::memcpy(&word, piece.data() + i * 8, 8);
      CHECK(word == pattern_word(77, i));
    }
  }
}

TEST_CASE("one wrong byte anywhere in a piece is one wrong word") {
  for (const std::size_t at : {0u, 63u, 64u, 1000u, 2047u, 2055u}) {
    auto piece = filled(2056, 5);
    piece[at] ^= 1;
    CHECK(count_wrong_words(piece, 5) == 1);
  }
}

TEST_CASE("a poisoned piece, a shifted piece and another piece's bytes are wrong in every word") {
  std::vector<std::uint8_t> piece(4096);
  poison(piece);
  CHECK(count_wrong_words(piece, 9) == 512);

  const auto longer = filled(4104, 9);
  CHECK(count_wrong_words(std::span(longer).subspan(8), 9) == 512);

  fill_piece(piece, 10);
  CHECK(count_wrong_words(piece, 9) == 512);
}

TEST_CASE("a piece's base differs with namespace, key, shard, layer and kind") {
  const PieceIdentity piece{hash_of(1), hash_of(100), 0, 0, TensorKind::k};
  std::set<std::uint64_t> bases{piece_base(piece)};
  const auto differs = [&](auto change) {
    PieceIdentity other = piece;
    change(other);
    CHECK(bases.insert(piece_base(other)).second);
  };
  for (std::size_t word = 0; word < 4; ++word) {
    differs([&](PieceIdentity& p) { p.namespace_digest.words[word] ^= 1; });
    differs([&](PieceIdentity& p) { p.key.words[word] ^= 1; });
  }
  differs([](PieceIdentity& p) { p.shard = 1; });
  differs([](PieceIdentity& p) { p.layer = 1; });
  differs([](PieceIdentity& p) { p.kind = TensorKind::v; });
  differs([](PieceIdentity& p) { p.kind = TensorKind::latent; });
}

TEST_CASE("a trace gives each request's block ids, up to the limit") {
  const std::string text =
      "{\"timestamp\": 0, \"input_length\": 900, \"hash_ids\": [0, 1]}\n"
      "\n"
      "{\"hash_ids\": []}\n"
      "{\"hash_ids\": [0, 4294967295, 3]}\n"
      "{\"hash_ids\": [9]}";
  std::istringstream all(text);
  const auto requests = read_trace(all, "t", 0);
  REQUIRE(requests);
  CHECK(*requests == BlockRequests{{0, 1}, {0, 4294967295u, 3}, {9}});
  std::istringstream some(text);
  const auto two = read_trace(some, "t", 2);
  REQUIRE(two);
  CHECK(two->size() == 2);
}

TEST_CASE("a damaged trace is refused with source and line") {
  for (const char* bad :
       {"nonsense", "[1]", "{}", "{\"hash_ids\": 4}", "{\"hash_ids\": [-1]}", "{\"hash_ids\": [4294967296]}",
        "{\"hash_ids\": [1.5]}", "{\"hash_ids\": [\"1\"]}"}) {
    std::istringstream in(std::string("{\"hash_ids\": [1]}\n") + bad);
    const auto requests = read_trace(in, "trace.jsonl", 0);
    REQUIRE_FALSE(requests);
    CHECK(requests.status() == Status::invalid_argument);
    CHECK(requests.error().message.find("trace.jsonl line 2") != std::string::npos);
  }
  const auto missing = read_trace_file("/nonexistent/trace.jsonl", 0);
  REQUIRE_FALSE(missing);
  CHECK(missing.status() == Status::not_found);
}

TEST_CASE("equal seeds give equal conversations, other seeds others") {
  ConversationOptions options;
  options.requests = 300;
  const auto first = generate_conversations(options);
  CHECK(first == generate_conversations(options));
  options.seed = 2;
  CHECK(first != generate_conversations(options));
}

TEST_CASE("conversations grow turn by turn from shared system prompts within their limits") {
  ConversationOptions options;
  options.requests = 2000;
  const auto requests = generate_conversations(options);
  REQUIRE(requests.size() == options.requests);
  std::set<std::vector<std::uint32_t>> seen;
  std::size_t continued = 0;
  std::size_t pages = 0;
  for (const auto& blocks : requests) {
    REQUIRE(blocks.size() > options.system_pages);
    CHECK(blocks.size() <= options.max_pages);
    CHECK(blocks.front() % options.system_pages == 0);
    CHECK(blocks[options.system_pages - 1] < options.system_prompts * options.system_pages);
    for (std::size_t n = options.system_pages + 1; n < blocks.size(); ++n) {
      if (seen.contains({blocks.begin(), blocks.begin() + static_cast<std::ptrdiff_t>(n)})) {
        ++continued;
        break;
      }
    }
    seen.insert(blocks);
    pages += blocks.size();
  }
  // A mean of six turns: five of six requests continue a conversation.
  CHECK(continued > requests.size() * 7 / 10);
  CHECK(continued < requests.size() * 95 / 100);
  CHECK(pages / requests.size() > options.system_pages + 4);
}

TEST_CASE("a workload's keys are the prefix-hash chain over tokens that equal the block ids") {
  const BlockRequests requests{{7, 8, 9}, {7, 8, 4}, {8}, {7}};
  const Workload workload = Workload::from_blocks(requests, 16);
  REQUIRE(workload.size() == 4);
  CHECK(workload.pages() == 8);
  CHECK(workload.longest() == 3);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    std::vector<std::uint32_t> tokens;
    for (const std::uint32_t block : requests[i]) tokens.insert(tokens.end(), 16, block);
    const auto chain = hash_chain(tokens, 16);
    const auto keys = workload.keys(i);
    CHECK(std::vector<PrefixHash>(keys.begin(), keys.end()) == chain);
  }
}

// The pages of a prefix cache one by one, without a tree: who was used last, who has somebody behind it.
static std::uint64_t flat_lru_hits(const Workload& workload, std::size_t capacity) {
  struct Page {
    std::uint64_t stamp = 0;
    std::optional<std::array<std::uint64_t, 4>> parent;
    int children = 0;
  };
  std::map<std::array<std::uint64_t, 4>, Page> pages;
  std::uint64_t clock = 0;
  std::uint64_t hits = 0;
  for (std::size_t request = 0; request < workload.size(); ++request) {
    const auto keys = workload.keys(request);
    std::size_t found = 0;
    while (found < keys.size() && pages.contains(keys[found].words)) ++found;
    hits += found;
    const auto in_use = [&](const std::array<std::uint64_t, 4>& key) {
      return std::any_of(keys.begin(), keys.end(), [&](const PrefixHash& k) { return k.words == key; });
    };
    for (std::size_t i = found; i < keys.size(); ++i) {
      if (pages.size() == capacity) {
        auto victim = pages.end();
        for (auto at = pages.begin(); at != pages.end(); ++at) {
          if (at->second.children == 0 && !in_use(at->first) &&
              (victim == pages.end() || at->second.stamp < victim->second.stamp)) {
            victim = at;
          }
        }
        if (victim->second.parent) --pages[*victim->second.parent].children;
        pages.erase(victim);
      }
      Page page;
      if (i > 0) {
        page.parent = keys[i - 1].words;
        ++pages[keys[i - 1].words].children;
      }
      pages[keys[i].words] = page;
    }
    // One use of all pages, the last one the oldest.
    for (std::size_t i = keys.size(); i-- > 0;) pages[keys[i].words].stamp = ++clock;
  }
  return hits;
}

TEST_CASE("the tree's lru has exactly the hits of page after page without a tree") {
  ConversationOptions options;
  options.requests = 400;
  for (const std::uint64_t seed : {1u, 2u, 3u}) {
    options.seed = seed;
    const auto workload = Workload::from_blocks(generate_conversations(options), 16);
    for (const std::uint64_t capacity : {60u, 150u, 400u}) {
      INFO("seed " << seed << ", " << capacity << " pages");
      const auto hits = replay_on_tree(workload, capacity, TreePolicy::lru);
      REQUIRE(hits.ok());
      CHECK(*hits == flat_lru_hits(workload, capacity));
    }
  }
}

TEST_CASE("the benchmark's namespaces have the wanted page bytes and a geometry that fits them") {
  for (const Attention attention : {Attention::mha, Attention::mla}) {
    for (const std::uint64_t bytes : {1 * kKiB, 16 * kKiB, 128 * kKiB, 1 * kMiB}) {
      const auto spec = make_spec(attention, 4, bytes);
      REQUIRE(spec);
      CHECK(spec->shard_bytes() == bytes);
      CHECK(spec->shards() == (attention == Attention::mha ? 4u : 1u));
      CHECK(make_geometry(*spec, 10).validate(*spec));
    }
    const auto odd = make_spec(attention, 4, 1000);
    REQUIRE_FALSE(odd);
    CHECK(odd.error().message.find("1000") != std::string::npos);
  }
}

TEST_CASE("a histogram's quantiles lie within a percent of the samples") {
  LatencyHistogram histogram;
  for (std::uint64_t ns = 1; ns <= 100'000; ++ns) histogram.record(ns);
  CHECK(histogram.count() == 100'000);
  CHECK(histogram.max() == 100'000);
  CHECK(within_a_percent(histogram.mean(), 50'000.5));
  for (const double quantile : {0.001, 0.5, 0.9, 0.999}) {
    CHECK(within_a_percent(histogram.quantile(quantile), quantile * 100'000));
  }
  LatencyHistogram other;
  other.record(5'000'000'000);
  histogram.merge(other);
  CHECK(histogram.max() == 5'000'000'000);
  CHECK(within_a_percent(histogram.quantile(1.0), 5e9));
  CHECK(LatencyHistogram{}.quantile(0.5) == 0);
}
