// Random work on a group of rank processes that are delayed, starved of pool pages and killed. After every
// step each rank's tree is compared with a sequential model that was written apart from it (naive_tree.hpp),
// every decision between the ranks, every page with what it must hold, every slot with the books.
#include <cstdio>
#include <random>

#include "tests/multiprocess/controller_round.hpp"
#include "tests/support/catch.hpp"

namespace hicache::test {

TEST_CASE(
    "ranks decide alike, and as the sequential model does, through random work, a pool that loses pages, "
    "resets and the death of a rank") {
  constexpr std::uint32_t kSteps = 1200;
  const unsigned seed = std::random_device{}();
  std::printf("seed %u\n", seed);
  INFO("seed " << seed);
  // A pool smaller than what is asked of it: it evicts on its own.
  const TestDaemon daemon(kStarvedPool);
  std::mt19937 random(seed);
  const WritePolicy policies[] = {WritePolicy::write_through, WritePolicy::write_through_selective,
                                  WritePolicy::write_back, WritePolicy::write_through};
  const TreePolicy evictions[] = {TreePolicy::lru, TreePolicy::lfu, TreePolicy::scan_resistant,
                                  TreePolicy::lru};
  for (std::uint32_t i = 0; i < 4; ++i) {
    Round round;
    round.seed = static_cast<unsigned>(random());
    round.steps = kSteps;
    round.policy = policies[i];
    round.eviction = evictions[i];
    if (i % 2 == 1) round.doomed = static_cast<std::uint32_t>(random() % kRanks);
    round.dies_at = 200 + static_cast<std::uint32_t>(random() % (kSteps - 300));
    const auto said = play(daemon, round);
    INFO("round " << i << ", rank " << round.doomed << " dies at step " << round.dies_at);
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      INFO("rank " << rank << " ended with: "
                   << said[rank].substr(said[rank].size() - std::min<std::size_t>(said[rank].size(), 300)));
      CHECK(said[rank].find("failed") == std::string::npos);
      if (rank != round.doomed) {
        CHECK((said[rank].find("lost\n") != std::string::npos) == round.somebody_dies());
      }
    }
    CHECK(decided_alike(said, round));
    if (!round.somebody_dies()) CHECK(said[0].find(std::to_string(kSteps - 1) + ":") != std::string::npos);
    const auto check = run_program({program("hicache-dump"), daemon.name(), "--check"});
    INFO(check.out + check.err);
    REQUIRE(check.status.exited_with(0));
  }
}

}  // namespace hicache::test
