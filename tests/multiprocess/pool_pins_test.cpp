// Prefixes that stay in the pool for their time, and no longer, and not beyond their share.
#include "hicache/controller/pool_pins.hpp"

#include "tests/support/catch.hpp"
#include "tests/support/rank_group.hpp"
#include "tests/support/test_rank.hpp"

namespace hicache::test {
namespace {

std::unique_ptr<Session> scheduler_of(const TestDaemon& daemon, const NamespaceSpec& spec) {
  AttachOptions options;
  options.socket_path = daemon.socket_path();
  options.engine = "engine";
  options.role = Role::scheduler;
  options.spec = spec;
  return TestRank::take(Session::attach(options));
}

// A pool of eight pages that evicts only when it needs a place.
constexpr const char* kSmallPool =
    R"({"pool": {"max_pages": 8}, "eviction": {"high_watermark": 0, "low_watermark": 0}})";

}  // namespace

TEST_CASE("a pinned prefix survives whatever the pool is filled with, until its time has come") {
  const TestDaemon daemon(kSmallPool);
  const NamespaceSpec spec = small_spec(Attention::mha, 1);
  TestRank rank(daemon, "engine", 0, spec);
  const auto scheduler = scheduler_of(daemon, spec);
  PoolPins pins(*scheduler, 4);
  const auto system_prompt = prompt(1, 3);
  CHECK(pins.pin(system_prompt, 100).status() == Status::not_found);
  REQUIRE(write_prompt(rank, 1, system_prompt) == 3);
  CHECK(TestRank::take(pins.pin(system_prompt, 100)) == 3);
  CHECK(pins.pages() == 3);
  std::uint64_t sequence = 1;
  const auto flood = [&] {
    for (std::uint32_t id = 10; id < 16; ++id) write_prompt(rank, ++sequence, prompt(id, 5));
  };
  flood();
  CHECK(rank.session().probe(system_prompt).leading == 3);
  // A pin only grows: the same prefix with an earlier time keeps the later one.
  CHECK(TestRank::take(pins.pin(system_prompt, 50)) == 3);
  CHECK((pins.pins() == 1 && pins.pages() == 3));
  pins.expire(99);
  flood();
  CHECK(rank.session().probe(system_prompt).leading == 3);
  pins.expire(100);
  CHECK(pins.pages() == 0);
  flood();
  CHECK(rank.session().probe(system_prompt).leading == 0);
  require_clean(daemon);
}

TEST_CASE("pins are bounded, hold up nothing of the ranks, and end with their engine") {
  const TestDaemon daemon(kSmallPool);
  const NamespaceSpec spec = small_spec(Attention::mha, 1);
  TestRank rank(daemon, "engine", 0, spec);
  const auto a = prompt(1, 3);
  const auto b = prompt(2, 3);
  REQUIRE(write_prompt(rank, 1, a) == 3);
  REQUIRE(write_prompt(rank, 2, b) == 3);
  auto scheduler = scheduler_of(daemon, spec);
  {
    PoolPins pins(*scheduler, 4);
    REQUIRE(pins.pin(a, 100).ok());
    const auto refused = pins.pin(b, 100);
    CHECK(refused.status() == Status::no_space);
    CHECK(refused.error().message == "pinning 3 pages beside the 3 pinned now; at most 4");
    // The ranks' sequences end as always: their agreements pass the pins.
    const auto agreed = rank.run(rank.session().agree(1));
    CHECK((agreed.status == Status::ok && agreed.agreed == 2));
    scheduler->close();  // the engine is gone before it gave anything back
  }
  REQUIRE(eventually([&] {
    const auto status = run_program({program("hicache-dump"), daemon.name(), "--json"});
    return status.out.find("\"pinned_pages\": 0") != std::string::npos;
  }));
  require_clean(daemon);
}

}  // namespace hicache::test
