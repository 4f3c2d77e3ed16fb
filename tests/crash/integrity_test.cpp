// Checksums: pages whose bytes changed behind the daemon's back are never served.
#include <set>

#include "tests/crash/crash_rig.hpp"
#include "tests/crash/flip_bits.hpp"
#include "tests/crash/region_surgeon.hpp"
#include "tests/support/catch.hpp"

using namespace hicache;
using namespace hicache::test;

namespace {

constexpr std::uint32_t kPrompts = 200;
constexpr std::uint32_t kDamaged = 100;
constexpr const char* kLazy = R"({"integrity": {"checksums": "always", "verify": "lazy"}})";
constexpr const char* kFull = R"({"integrity": {"checksums": "always", "verify": "full"}})";

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

struct Tally {
  std::uint32_t served = 0;
  std::uint32_t refused = 0;
  std::uint32_t missed = 0;
};
Tally read_all(TestRank& rank, const std::vector<std::vector<PrefixHash>>& prompts,
               std::uint64_t first_sequence) {
  Tally out;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    const ReadBack read = read_back(rank, first_sequence + i, prompts[i]);
    CHECK(read.wrong == 0);
    if (read.status == Status::corrupt) {
      ++out.refused;
    } else {
      CHECK(read.status == Status::ok);
      (read.hits > 0 ? out.served : out.missed) += 1;
    }
  }
  return out;
}

std::vector<std::uint32_t> every_second_page(const std::string& name) {
  const auto ready = RegionSurgeon(name).ready_pages();
  REQUIRE(ready.size() == kPrompts);
  std::vector<std::uint32_t> chosen;
  for (std::size_t i = 0; i < ready.size(); i += 2) chosen.push_back(ready[i]);
  REQUIRE(chosen.size() == kDamaged);
  return chosen;
}

}  // namespace

TEST_CASE(
    "with checksums always, 100 pages that change in the pool are refused once, then missed, never served") {
  TestDaemon daemon(kLazy);
  TestRank rank(daemon, "engine", 0, small_spec(Attention::mha, 1));
  const auto prompts = write_prompts(rank, kPrompts, 1);
  flip_bits(daemon.name(), every_second_page(daemon.name()));
  const Tally first = read_all(rank, prompts, 1000);
  CHECK(first.served == kPrompts - kDamaged);
  CHECK(first.refused == kDamaged);
  CHECK(dump_findings(daemon.name()) == "");
  const Tally second = read_all(rank, prompts, 2000);
  CHECK(second.served == kPrompts - kDamaged);
  CHECK(second.missed == kDamaged);
  const RegionSurgeon region(daemon.name());
  CHECK(region.counter(Counter::checksum_mismatches) == kDamaged);
  CHECK(region.counter(Counter::quarantined) == kDamaged);
  CHECK(region.counter(Counter::written) ==
        region.counter(Counter::ready_pages) + region.counter(Counter::quarantined));
  CHECK(contains(daemon.log(), "has a wrong checksum: quarantined"));
  // Written anew they are served again, from other slots.
  for (std::uint32_t i = 0; i < kPrompts; ++i) write_prompt(rank, 3000 + i, prompts[i]);
  CHECK(read_all(rank, prompts, 4000).served == kPrompts);
  CHECK(dump_findings(daemon.name()) == "");
}

TEST_CASE("a wrong page in the middle of a prefix takes the pages behind it along, pinned or not") {
  TestDaemon daemon(kLazy);
  TestRank rank(daemon, "engine", 0, small_spec(Attention::mha, 1));
  const auto hashes = prompt(5, 10);
  REQUIRE(write_prompt(rank, 1, hashes) == 10);
  const RegionSurgeon region(daemon.name());
  std::vector<std::uint32_t> middle;
  for (const std::uint32_t page : region.ready_pages()) {
    if (region.tables().pages[page].depth == 4) middle.push_back(page);
  }
  flip_bits(daemon.name(), middle);
  const auto reserved = rank.run(rank.session().reserve(2, hashes));
  REQUIRE(reserved.hits == 10);
  const auto pages = TestRank::pages(0, 10);
  LayerFence fence{0, 1};
  auto ticket = rank.session().load(reserved.lease, 0, pages, fence);
  REQUIRE(ticket.ok());
  CHECK(rank.session().wait_layer(fence, 0, kPatienceMs).status() == Status::corrupt);
  CHECK(rank.run(std::move(ticket)).status == Status::corrupt);
  CHECK(dump_findings(daemon.name()) == "");  // still pinned by the lease
  CHECK(rank.session().probe(hashes).leading == 4);
  // The lease can go on: what is right is loaded, what is gone is written again.
  CHECK(rank.run(rank.session().load(reserved.lease, 0, TestRank::pages(0, 4))).status == Status::ok);
  CHECK(rank.run(rank.session().load(reserved.lease, 4, TestRank::pages(4, 2))).status == Status::not_found);
  for (std::uint32_t i = 4; i < 10; ++i) rank.fill(pages[i], hashes[i]);
  const auto written = rank.run(rank.session().write(reserved.lease, 4, TestRank::pages(4, 6)));
  CHECK(written.written == 6);
  CHECK(rank.run(rank.session().release(reserved.lease)).status == Status::ok);
  CHECK(dump_findings(daemon.name()) == "");
  CHECK(read_back(rank, 3, hashes).hits == 10);
}

TEST_CASE("with verify full a takeover drops 100 damaged pages before anybody can ask for them") {
  TestDaemon daemon(kFull);
  std::vector<std::vector<PrefixHash>> prompts;
  {
    TestRank rank(daemon, "engine", 0, small_spec(Attention::mha, 1));
    prompts = write_prompts(rank, kPrompts, 1);
    daemon.kill9();
  }
  flip_bits(daemon.name(), every_second_page(daemon.name()));
  daemon.start();
  CHECK(dump_findings(daemon.name()) == "");
  TestRank rank(daemon, "reader", 0, small_spec(Attention::mha, 1));
  const Tally read = read_all(rank, prompts, 1);
  CHECK(read.served == kPrompts - kDamaged);
  CHECK(read.missed == kDamaged);
  const RegionSurgeon region(daemon.name());
  CHECK(region.counter(Counter::checksum_mismatches) == kDamaged);
  CHECK(region.counter(Counter::pages_not_kept) == kDamaged);
}

TEST_CASE("checksums survive a kill: lazily verified pages are refused at their first load") {
  TestDaemon daemon(kLazy);
  std::vector<std::vector<PrefixHash>> prompts;
  {
    TestRank rank(daemon, "engine", 0, small_spec(Attention::mha, 1));
    prompts = write_prompts(rank, kPrompts, 1);
    daemon.kill9();
  }
  flip_bits(daemon.name(), every_second_page(daemon.name()));
  daemon.start();
  TestRank rank(daemon, "reader", 0, small_spec(Attention::mha, 1));
  const Tally read = read_all(rank, prompts, 1);
  CHECK(read.served == kPrompts - kDamaged);
  CHECK(read.refused == kDamaged);
}

TEST_CASE("verify full without checksums is refused with the reason") {
  TempDir dir;
  write_text(dir.file("c.json"), R"({"integrity": {"checksums": "sampled", "verify": "full"}})");
  const auto run = run_program({program("hicached"), "--config", dir.file("c.json"), "--check-config"});
  CHECK(run.status.exited_with(2));
  CHECK(contains(run.err, "integrity.verify"));
  CHECK(contains(run.err, "a page without a checksum can't be verified"));
}
