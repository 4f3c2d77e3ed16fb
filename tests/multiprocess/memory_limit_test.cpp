// A daemon that gets no more memory: huge requests are refused, everything else goes on.
#include <sys/resource.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <random>

#include "tests/support/catch.hpp"
#include "tests/support/rank_group.hpp"
#include "tests/support/test_rank.hpp"

namespace hicache::test {
namespace {

// Address space of the daemon from now on: what it has and `more`.
void limit_memory(const TestDaemon& daemon, std::uint64_t more) {
  std::uint64_t pages = 0;
  std::ifstream("/proc/" + std::to_string(daemon.pid()) + "/statm") >> pages;
  REQUIRE(pages > 0);
  rlimit limit{};
  limit.rlim_cur = limit.rlim_max = pages * 4096 + more;
  REQUIRE(::prlimit(daemon.pid(), RLIMIT_AS, &limit, nullptr) == 0);
}

// A request of as many pages as one operation may have; nothing of it is cached.
std::vector<PrefixHash> huge_request(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<PrefixHash> hashes(kMaxPagesPerOperation);
  for (PrefixHash& hash : hashes) std::generate(hash.words.begin(), hash.words.end(), std::ref(random));
  return hashes;
}

}  // namespace

TEST_CASE("a client's huge requests take what memory there is and are refused then; the daemon goes on") {
  const TestDaemon daemon(R"({"pool": {"max_pages": 65536}, "limits": {"leases_per_group": 4096}})");
  const NamespaceSpec spec = small_spec(Attention::mha, 1);
  TestRank greedy(daemon, "greedy", 0, spec);
  TestRank modest(daemon, "modest", 0, spec);
  REQUIRE(write_prompt(modest, 1, prompt(1, 8)) == 8);
  limit_memory(daemon, 64 * kMiB);
  std::vector<LeaseId> leases;
  std::uint64_t sequence = 0;
  OperationResult last;
  while (leases.size() < 500) {
    ++sequence;
    last = greedy.run(greedy.session().reserve(sequence, huge_request(sequence)));
    if (last.status != Status::ok) break;
    leases.push_back(last.lease);
  }
  CHECK(last.status == Status::again);
  CHECK(leases.size() >= 5);
  CHECK(leases.size() < 500);
  // Others, and this one's smaller requests, notice nothing.
  REQUIRE(write_prompt(modest, 2, prompt(2, 40)) == 40);
  REQUIRE(write_prompt(greedy, ++sequence, prompt(3, 40)) == 40);
  CHECK(modest.session().probe(prompt(1, 8)).leading == 8);
  // What is given back can be used again.
  for (const LeaseId lease : leases)
    REQUIRE(greedy.run(greedy.session().release(lease)).status == Status::ok);
  ++sequence;
  CHECK(greedy.run(greedy.session().reserve(sequence, huge_request(sequence))).status == Status::ok);
  require_clean(daemon);
}

}  // namespace hicache::test
