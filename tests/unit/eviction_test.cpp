#include <map>
#include <random>
#include <set>

#include "daemon/eviction/evictable_pages.hpp"
#include "tests/support/catch.hpp"

namespace hicache::daemon {

TEST_CASE("lru ranks by last use alone, lfu by number of uses first") {
  const auto lru = make_eviction_policy(EvictionPolicyName::lru);
  const auto lfu = make_eviction_policy(EvictionPolicyName::lfu);
  const PageUse old_and_popular{10, 5};
  const PageUse recent_and_rare{20, 1};
  CHECK(lru->rank(old_and_popular) < lru->rank(recent_and_rare));
  CHECK(lfu->rank(recent_and_rare) < lfu->rank(old_and_popular));
  CHECK(lfu->rank({10, 2}) < lfu->rank({20, 2}));
}

TEST_CASE("the evictable set gives pages in rank order, of one class and of all") {
  EvictablePages set(16);
  const SizeClassId small{0};
  const SizeClassId large{1};
  set.insert(PageId{3}, small, {30, 0});
  set.insert(PageId{1}, large, {10, 0});
  set.insert(PageId{2}, small, {20, 0});
  CHECK(set.first() == PageId{1});
  CHECK(set.first(small) == PageId{2});
  set.erase(PageId{1}, large);
  CHECK(set.first(large).is_none());
  CHECK(set.first() == PageId{2});
  set.erase(PageId{7}, small);  // was never in: nothing happens
  CHECK(set.size() == 2);
  CHECK(set.first(SizeClassId{9}).is_none());
}

TEST_CASE("the evictable set agrees with a sorted set under random changes") {
  const auto seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  constexpr std::uint32_t kPages = 200;
  EvictablePages set(kPages);
  std::set<std::pair<std::uint64_t, std::uint32_t>> model;
  std::map<std::uint32_t, std::uint64_t> rank_of;
  std::uint64_t clock = 0;
  for (int step = 0; step < 50'000; ++step) {
    const auto page = static_cast<std::uint32_t>(random() % kPages);
    const SizeClassId size_class{page % 3};
    if (const auto found = rank_of.find(page); found != rank_of.end()) {
      set.erase(PageId{page}, size_class);
      model.erase({found->second, page});
      rank_of.erase(found);
    } else {
      const std::uint64_t rank =
          random() % 2 ? ++clock + 1'000'000 : random() % 1'000'000 * 1'000 + ++clock % 1'000;
      if (model.contains({rank, page})) continue;
      set.insert(PageId{page}, size_class, {rank, page});
      model.emplace(rank, page);
      rank_of.emplace(page, rank);
    }
    REQUIRE(set.size() == model.size());
    REQUIRE(set.first() == (model.empty() ? PageId::none() : PageId{model.begin()->second}));
  }
}

}  // namespace hicache::daemon
