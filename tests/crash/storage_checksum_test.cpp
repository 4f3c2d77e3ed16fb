// Checksums where the storage tier is: the policy `storage`, and pages that went wrong before, in or behind
// it.
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/crash/crash_rig.hpp"
#include "tests/crash/flip_bits.hpp"
#include "tests/support/storage_daemon.hpp"

using namespace hicache;
using namespace hicache::test;

namespace {

constexpr auto kComplete = PrefetchPolicy::wait_complete;
constexpr const char* kStoragePolicy = R"({"integrity": {"checksums": "storage", "verify": "lazy"}})";

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// The page of depth `depth` of the only prompt in the pool.
std::uint32_t page_at(const std::string& name, std::uint32_t depth) {
  const RegionSurgeon region(name);
  for (const std::uint32_t page : region.ready_pages()) {
    if (region.tables().pages[page].depth == depth) return page;
  }
  FAIL("no page of depth " << depth);
  return 0;
}

// How many ready pages have a checksum.
std::uint32_t summed_pages(const std::string& name) {
  const RegionSurgeon region(name);
  std::uint32_t count = 0;
  for (const std::uint32_t page : region.ready_pages()) {
    const std::uint64_t line = region.tables().pages[page].pool_offset.load() / kPoolAlignment;
    count += region.tables().checksums[line].load() != 0 ? 1 : 0;
  }
  return count;
}

OperationResult fetch(TestRank& rank, LeaseId lease, std::uint32_t first, std::uint32_t count) {
  return rank.run(rank.session().prefetch(lease, first, count, kComplete));
}

}  // namespace

TEST_CASE("with checksums storage a page has none until it goes to storage") {
  StorageDaemon rig(R"({"backup_policy": "write_through_selective", "backup_uses": 2})", kStoragePolicy);
  TestRank rank(rig.daemon(), "engine", 0, small_spec(Attention::mha, 1));
  const auto hashes = prompt(1, 6);
  REQUIRE(write_prompt(rank, 1, hashes) == 6);
  rig.sync();
  CHECK(summed_pages(rig.daemon().name()) == 0);
  CHECK(read_back(rank, 2, {hashes.begin(), hashes.begin() + 4}).hits == 4);  // the second use of four
  rig.sync();
  CHECK(rig.counter("backed_up") == 4);
  CHECK(summed_pages(rig.daemon().name()) == 4);
  rig.require_clean();
}

TEST_CASE(
    "with checksums storage a page that changes after its backup is refused, and comes back from storage") {
  StorageDaemon rig("{}", kStoragePolicy);
  TestRank rank(rig.daemon(), "engine", 0, small_spec(Attention::mha, 1));
  const auto hashes = prompt(2, 6);
  REQUIRE(write_prompt(rank, 1, hashes) == 6);
  rig.sync();
  flip_bits(rig.daemon().name(), {page_at(rig.daemon().name(), 3)});
  CHECK(read_back(rank, 2, hashes).status == Status::corrupt);
  CHECK(rig.counter("quarantined") == 1);
  CHECK(contains(rig.daemon().log(), "has a wrong checksum: quarantined"));

  const auto reserved = rank.run(rank.session().reserve(3, hashes));
  CHECK(reserved.hits == 3);
  CHECK(fetch(rank, reserved.lease, 3, 3).written == 3);
  CHECK(loads_right(rank, reserved.lease, hashes, 6));
  rank.run(rank.session().release(reserved.lease));
  rig.require_clean();
}

TEST_CASE("with checksums storage a page that changes after it came from storage is refused") {
  StorageDaemon rig("{}", kStoragePolicy);
  TestRank rank(rig.daemon(), "engine", 0, small_spec(Attention::mha, 1));
  const auto hashes = prompt(3, 5);
  rig.store(rank, 1, hashes);
  const auto reserved = rank.run(rank.session().reserve(2, hashes));
  REQUIRE(fetch(rank, reserved.lease, 0, 5).written == 5);
  CHECK(summed_pages(rig.daemon().name()) == 5);
  CHECK(loads_right(rank, reserved.lease, hashes, 5));
  CHECK(rig.counter("shards_verified") == 5);
  rank.run(rank.session().release(reserved.lease));
  flip_bits(rig.daemon().name(), {page_at(rig.daemon().name(), 0)});
  CHECK(read_back(rank, 3, hashes).status == Status::corrupt);
  CHECK(read_back(rank, 4, hashes).hits == 0);
  rig.require_clean();
}

TEST_CASE("a page that changed before its backup never reaches storage, nor do those behind it") {
  StorageDaemon rig(R"({"backup_policy": "write_through_selective", "backup_uses": 2})",
                    R"({"integrity": {"checksums": "always", "verify": "lazy"}})");
  TestRank rank(rig.daemon(), "engine", 0, small_spec(Attention::mha, 1));
  const auto hashes = prompt(4, 6);
  REQUIRE(write_prompt(rank, 1, hashes) == 6);
  flip_bits(rig.daemon().name(), {page_at(rig.daemon().name(), 2)});
  // A second use that loads nothing, so that nobody has compared anything yet.
  const auto reserved = rank.run(rank.session().reserve(2, hashes));
  REQUIRE(reserved.hits == 6);
  rank.run(rank.session().release(reserved.lease));
  rig.sync();
  CHECK(rig.counter("backed_up") == 2);
  CHECK(rig.counter("quarantined") == 1);
  CHECK(rig.counter("checksum_mismatches") == 1);
  CHECK(rig.counter("backup_failed") == 4);
  CHECK(rig.ask({"storage", "status"}).at("backend").at("pages") == 2);
  CHECK(contains(rig.daemon().log(), "has a wrong checksum: quarantined, 3 pages behind it dropped"));
  CHECK(rank.session().probe(hashes).leading == 2);
  rig.require_clean();
}

TEST_CASE("a page that is spoilt in a file of the storage is a miss, counted and logged with key and place") {
  const TempDir dir;
  const std::string pages = dir.file("pages");
  const nlohmann::json storage = {
      {"backend", "file"},
      {"file", {{"directories", {pages}}, {"segment_bytes", "256KiB"}, {"min_free", 0}}}};
  StorageDaemon rig(storage.dump(), kStoragePolicy);
  TestRank rank(rig.daemon(), "engine", 0, small_spec(Attention::mha, 1));
  const auto hashes = prompt(5, 4);
  rig.store(rank, 1, hashes);
  // The bytes of its last page, wherever they are.
  const std::uint64_t first_word = page_content(hashes[3], 0, 0);
  std::uint32_t spoilt = 0;
  for (const auto& entry : std::filesystem::directory_iterator(pages)) {
    if (!entry.is_regular_file()) continue;
    std::string bytes = read_text(entry.path().string());
    const std::string wanted(reinterpret_cast<const char*>(&first_word), sizeof first_word);
    const auto at = bytes.find(wanted);
    if (at == std::string::npos) continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(at));
    file.put(static_cast<char>(bytes[at] ^ 4));
    ++spoilt;
  }
  REQUIRE(spoilt == 1);
  const auto reserved = rank.run(rank.session().reserve(2, hashes));
  const auto fetched = fetch(rank, reserved.lease, 0, 4);
  CHECK(fetched.written == 3);
  CHECK(loads_right(rank, reserved.lease, hashes, 3));
  CHECK(rig.counter("storage_corrupt") == 1);
  CHECK(contains(rig.daemon().log(), "(key " + to_hex(hashes[3]) + ", pool offset"));
  CHECK(contains(rig.daemon().log(), "came damaged from storage: dropped, a miss"));
  rank.run(rank.session().release(reserved.lease));
  rig.require_clean();
}
