// hicache-dump beside a real daemon: alive, dead, truncated, piped into a reader that leaves.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <nlohmann/json.hpp>

#include "shm/region.hpp"
#include "shm/shared_memory.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/test_rank.hpp"

namespace hicache::test {
namespace {

RunResult dump(const std::string& name, const std::vector<std::string>& options = {}) {
  std::vector<std::string> argv{program("hicache-dump"), name};
  argv.insert(argv.end(), options.begin(), options.end());
  return run_program(argv);
}

nlohmann::json dump_json(const std::string& name, std::vector<std::string> options = {}) {
  options.push_back("--json");
  const RunResult run = dump(name, options);
  INFO(run.out + run.err);
  REQUIRE(run.status.exited_with(0));
  return nlohmann::json::parse(run.out);
}

// Leaves what a killed daemon leaves; the object goes with the test.
struct Leftovers {
  explicit Leftovers(std::string n) : name(std::move(n)) {}
  ~Leftovers() { remove_shm_leftovers(name); }
  std::string name;
};

}  // namespace

TEST_CASE("the dump of a live daemon shows its pages, ranks, rings and operations, and its check is clean") {
  const TestDaemon daemon;
  TestRank rank(daemon, "engine", 0, small_spec(Attention::mha, 1));
  const auto hashes = prompt(1, 6);
  REQUIRE(write_prompt(rank, 1, hashes) == 6);
  const auto doc = dump_json(daemon.name(), {"--pages", "--index", "--rings", "--ranks", "--ops", "--check"});
  CHECK(doc["verdict"]["condition"] == "alive");
  CHECK(doc["header"]["daemon_pid"] == daemon.pid());
  CHECK(doc["config"]["name"] == daemon.name());
  CHECK(doc["check"]["clean"] == true);
  CHECK(doc["check"]["gauges_compared"] == true);
  CHECK(doc["pages"]["states"]["ready"] == 6);
  CHECK(doc["counters"]["written"] == 6);
  CHECK(doc["namespaces"][0]["pool_bytes"] == 6 * small_spec(Attention::mha, 1).slot_bytes());
  REQUIRE(doc["clients"].size() == 1);
  CHECK(doc["clients"][0]["pid"] == ::getpid());
  CHECK(doc["rings"][0]["sq_head"] == doc["rings"][0]["sq_tail_seen"]);
  REQUIRE(doc["page_list"].size() == 6);
  std::vector<std::string> keys;
  for (const auto& page : doc["page_list"]) keys.push_back(page["key"]);
  for (const PrefixHash& hash : hashes) CHECK(std::count(keys.begin(), keys.end(), to_hex(hash)) == 1);
  const auto& records = doc["operations"]["records"];
  CHECK(std::any_of(records.begin(), records.end(),
                    [](const auto& r) { return r["opcode"] == "write" && r["event"] == "complete"; }));

  const RunResult text =
      dump(daemon.name(), {"--pages", "--ranks", "--rings", "--index", "--ops", "--check"});
  CHECK(text.status.exited_with(0));
  CHECK(text.out.find("region '" + daemon.name() + "': alive") == 0);
  CHECK(text.out.find(to_hex(hashes[3])) != std::string::npos);
}

TEST_CASE("pages of MLA ranks are in the pool once, whatever the size of the group") {
  const TestDaemon daemon;
  const NamespaceSpec spec = small_spec(Attention::mla, 2);
  TestRank rank0(daemon, "engine", 0, spec);
  TestRank rank1(daemon, "engine", 1, spec);
  const auto hashes = prompt(1, 4);
  const auto reserved = rank0.run(rank0.session().reserve(1, hashes));
  REQUIRE(rank1.run(rank1.session().reserve(1, hashes)).status == Status::ok);
  for (std::uint32_t i = 0; i < 4; ++i) {
    rank0.fill(DevicePage{i}, hashes[i]);
    rank1.fill(DevicePage{i}, hashes[i]);
  }
  const auto first = rank0.session().write(reserved.lease, 0, TestRank::pages(0, 4));
  REQUIRE(rank1.run(rank1.session().write(reserved.lease, 0, TestRank::pages(0, 4))).written == 4);
  REQUIRE(rank0.run(first).written == 4);
  const auto doc = dump_json(daemon.name(), {"--ranks", "--check"});
  CHECK(doc["check"]["clean"] == true);
  CHECK(doc["namespaces"][0]["shards"] == 1);
  CHECK(doc["namespaces"][0]["pool_bytes"] == 4 * spec.shard_stride());
  REQUIRE(doc["leases"].size() == 1);
  CHECK(doc["leases"][0]["pins"] == 4);
}

TEST_CASE("the region of a killed daemon is read as dead and checked exactly") {
  TestDaemon daemon;
  const Leftovers leftovers(daemon.name());
  TestRank rank(daemon, "engine", 0, small_spec(Attention::mha, 1));
  REQUIRE(write_prompt(rank, 1, prompt(1, 6)) == 6);
  daemon.kill9();
  const auto doc = dump_json(daemon.name(), {"--check", "--ranks"});
  CHECK(doc["verdict"]["condition"] == "dead");
  CHECK(doc["check"]["exact"] == true);
  CHECK(doc["check"]["clean"] == true);
  CHECK(doc["pages"]["states"]["ready"] == 6);
  CHECK(doc["clients"].size() == 1);
}

TEST_CASE("a copy of a region in a file is read like the region, and damage to it is found") {
  TestDaemon daemon;
  const Leftovers leftovers(daemon.name());
  TestRank rank(daemon, "engine", 0, small_spec(Attention::mha, 1));
  REQUIRE(write_prompt(rank, 1, prompt(1, 6)) == 6);
  daemon.kill9();
  const TempDir dir;
  std::string bytes = read_text("/dev/shm/" + control_object_name(daemon.name()));
  const std::string path = dir.file("copy");
  write_text(path, bytes);
  const std::string tool = program("hicache-dump");
  CHECK(run_program({tool, "--file", path, "--check"}).status.exited_with(0));

  const RegionCheck header = check_header(
      std::span(reinterpret_cast<const std::uint8_t*>(bytes.data()), kHeaderBytes), bytes.size());
  REQUIRE(header.verdict == RegionVerdict::usable);
  std::string wrong = bytes;
  wrong[header.plan.section(SectionKind::counters).offset +
        8 * static_cast<std::size_t>(Counter::ready_pages)]++;
  write_text(path, wrong);
  const RunResult found = run_program({tool, "--file", path, "--check"});
  CHECK(found.status.exited_with(1));
  CHECK(found.out.find("wrong gauge: counter ready_pages is 7, the tables say 6") != std::string::npos);

  write_text(path, bytes.substr(0, bytes.size() / 2));
  const RunResult cut = run_program({tool, "--file", path, "--check", "--pages"});
  CHECK(cut.status.exited_with(2));
  CHECK(cut.out.find("damaged") != std::string::npos);

  std::string other = bytes;
  other[offsetof(RegionHeader, layout_fingerprint)]++;
  write_text(path, other);
  CHECK(run_program({tool, "--file", path}).status.exited_with(3));
  write_text(path, "nothing of the kind");
  CHECK(run_program({tool, "--file", path}).status.exited_with(2));
}

TEST_CASE("an object that is made shorter while it is read does not hurt the tool") {
  TestDaemon daemon;
  const Leftovers leftovers(daemon.name());
  daemon.kill9();
  auto fd = open_named(control_object_name(daemon.name()), Mapping::Access::read_write);
  REQUIRE(fd.ok());
  const std::uint64_t size = object_size(fd->get()).value();
  Child shrinker = Child::run([&] {
    for (int i = 0; i < 100'000; ++i) {
      if (::ftruncate(fd->get(), i % 2 == 0 ? 4096 : static_cast<off_t>(size)) != 0) return 1;
    }
    return 0;
  });
  for (int i = 0; i < 20; ++i) {
    const RunResult run = dump(daemon.name(), {"--check", "--pages"});
    INFO(run.out + run.err);
    CHECK(run.status.signal == 0);
    CHECK(run.status.code <= 2);
  }
  shrinker.kill(SIGKILL);
}

TEST_CASE("a reader that leaves early is no error") {
  const TestDaemon daemon;
  const RunResult run = run_program({"/bin/bash", "-c",
                                     "set -o pipefail; '" + program("hicache-dump") + "' '" + daemon.name() +
                                         "' --ops --pages --index | head -n 1"});
  CHECK(run.status.exited_with(0));
  CHECK(run.out.find("alive") != std::string::npos);
}

TEST_CASE("a name that no daemon has is said to be unknown") {
  const RunResult missing = dump(unique_region_name());
  CHECK(missing.status.exited_with(4));
  CHECK(missing.err.find("No such file") != std::string::npos);
  CHECK(dump("../etc/passwd").status.exited_with(5));
}

TEST_CASE("the check of a daemon at work is clean") {
  const TestDaemon daemon(
      R"({"pool": {"max_pages": 40}, "eviction": {"high_watermark": 0, "low_watermark": 0}})");
  Child worker = Child::run([&] {
    TestRank rank(daemon, "engine", 0, small_spec(Attention::mha, 1));
    for (std::uint32_t i = 1; i < 1'000'000; ++i) write_prompt(rank, i, prompt(i % 50, 1 + i % 20));
    return 0;
  });
  REQUIRE(eventually([&] { return dump_json(daemon.name())["counters"]["evicted"] > 100; }));
  for (int i = 0; i < 30; ++i) {
    const RunResult run = dump(daemon.name(), {"--check"});
    INFO(run.out + run.err);
    CHECK(run.status.exited_with(0));
  }
  worker.kill(SIGKILL);
  worker.wait();
  // The dead rank's lease goes with it.
  REQUIRE(eventually([&] { return dump_json(daemon.name())["counters"]["live_leases"] == 0; }));
  CHECK(dump_json(daemon.name(), {"--check"})["check"]["clean"] == true);
}

}  // namespace hicache::test
