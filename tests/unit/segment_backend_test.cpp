// The backend `file` with format `segment` through its interface, on real files, with both engines.
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/support/catch.hpp"
#include "tests/support/storage_rig.hpp"

namespace hicache::test {
namespace {

using Json = nlohmann::ordered_json;

Json settings(const std::string& directory, const std::string& engine = "auto") {
  return {{"directories", Json::array({directory})},
          {"engine", engine},
          {"segment_bytes", "1MiB"},
          {"min_free", 0},
          {"workers", 2},
          {"queue_depth", 8}};
}

bool io_uring_works() {
  StorageRig rig(kMiB);
  const TempDir dir;
  return rig.make("file", settings(dir.path(), "io_uring")).empty();
}

// Both engines, but for io_uring where the kernel or the build has none.
std::vector<std::string> engines() {
  if (io_uring_works()) return {"threads", "io_uring"};
  WARN("no io_uring here: only the engine of threads is tested");
  return {"threads"};
}

std::uint64_t bytes_on_disk(const std::string& directory) {
  std::uint64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    struct stat info {};
    if (::stat(entry.path().c_str(), &info) == 0) bytes += static_cast<std::uint64_t>(info.st_blocks) * 512;
  }
  return bytes;
}

std::vector<std::string> segments_in(const std::string& directory) {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    if (entry.path().filename().string().rfind("segment-", 0) == 0) paths.push_back(entry.path().string());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

}  // namespace

TEST_CASE("segment: pages come back as they were put, with both engines and any shape") {
  for (const std::string& engine : engines()) {
    INFO("engine " << engine);
    const TempDir dir;
    StorageRig rig;
    REQUIRE(rig.make("file", settings(dir.path(), engine)) == "");
    // Whole blocks, a payload that needs padding, several shards behind each other, and shards that lie
    // apart.
    const struct {
      std::uint64_t shard_bytes;
      std::uint32_t shards;
      std::uint64_t gap;
    } shapes[] = {{65536, 1, 0}, {10000, 1, 0}, {5000, 4, 0}, {8192, 3, 4096}, {300000, 2, 0}};
    for (const auto& shape : shapes) {
      INFO(shape.shards << " shards of " << shape.shard_bytes);
      const auto ns =
          storage_namespace(shape.shard_bytes, shape.shards, "shape " + std::to_string(shape.shard_bytes));
      const auto pages = numbers(1, 20);
      for (const Status s : rig.run(StorageOperation::put, ns, pages, shape.gap)) CHECK(s == Status::ok);
      for (const Status s : rig.run(StorageOperation::exists, ns, pages)) CHECK(s == Status::ok);
      const auto got = rig.get(ns, pages, shape.gap);
      CHECK(got.ok == pages.size());
      CHECK(got.wrong == 0);
    }
    CHECK(rig.backend().stats().pages == 100);
    CHECK(rig.backend().health().usable);
    rig.close();
    CHECK(rig.sink().faults() == "");
  }
}

TEST_CASE("segment: what was never put, and what another namespace put, is not found") {
  const TempDir dir;
  StorageRig rig;
  REQUIRE(rig.make("file", settings(dir.path())) == "");
  const auto ns = storage_namespace(8192);
  const auto other = storage_namespace(8192, 1, "other/model");
  CHECK(rig.put(ns, 1, 4) == 4);
  CHECK(rig.get(other, numbers(1, 4)).missing == 4);
  CHECK(rig.get(ns, numbers(100, 4)).missing == 4);
  const auto outcomes = rig.run(StorageOperation::exists, ns, {3, 100, 4});
  CHECK(outcomes == std::vector<Status>{Status::ok, Status::not_found, Status::ok});
  // The same digest with another shape, as a forged file could claim: nothing of the one fits the other.
  auto forged = std::make_shared<StorageNamespace>(*storage_namespace(4096));
  forged->digest = ns->digest;
  CHECK(rig.get(forged, numbers(1, 4)).missing == 4);
}

TEST_CASE("segment: a page that is there is not written again") {
  const TempDir dir;
  StorageRig rig;
  REQUIRE(rig.make("file", settings(dir.path())) == "");
  const auto ns = storage_namespace(65536);
  for (int i = 0; i < 20; ++i) CHECK(rig.put(ns, 1, 4) == 4);
  // 80 writes of 64 KiB would need five segments of 1 MiB; four pages need one, and a spare.
  CHECK(segments_in(dir.path()).size() <= 2);
  CHECK(rig.backend().stats().pages == 4);
}

TEST_CASE("segment: a restart brings sealed and open segments back") {
  for (const std::string& engine : engines()) {
    const TempDir dir;
    StorageRig rig;
    const auto ns = storage_namespace(50000, 2);
    REQUIRE(rig.make("file", settings(dir.path(), engine)) == "");
    CHECK(rig.put(ns, 1, 100) == 100);
    rig.close();
    REQUIRE(rig.make("file", settings(dir.path(), engine)) == "");
    CHECK(rig.backend().stats().pages == 100);
    for (std::uint64_t first = 1; first <= 100; first += 20) {
      const auto got = rig.get(ns, numbers(first, 20));
      CHECK(got.ok == 20);
      CHECK(got.wrong == 0);
    }
    // And it goes on: new pages beside the old ones, and both after the next restart.
    CHECK(rig.put(ns, 101, 50) == 50);
    rig.close();
    REQUIRE(rig.make("file", settings(dir.path(), engine)) == "");
    CHECK(rig.backend().stats().pages == 150);
    CHECK(rig.get(ns, numbers(91, 20)).ok == 20);
  }
}

TEST_CASE("segment: several directories share the pages and all are read after a restart") {
  const TempDir a;
  const TempDir b;
  StorageRig rig;
  Json two = settings(a.path());
  two["directories"] = {a.path(), b.path()};
  REQUIRE(rig.make("file", two) == "");
  const auto ns = storage_namespace(30000);
  CHECK(rig.put(ns, 1, 200) == 200);
  CHECK(!segments_in(a.path()).empty());
  CHECK(!segments_in(b.path()).empty());
  rig.close();
  REQUIRE(rig.make("file", two) == "");
  CHECK(rig.backend().stats().pages == 200);
  CHECK(rig.get(ns, numbers(50, 100)).ok == 100);
}

TEST_CASE("segment: capacity is held on the disk, and whole segments make room") {
  const TempDir dir;
  StorageRig rig;
  Json small = settings(dir.path());
  small["capacity"] = "8MiB";
  REQUIRE(rig.make("file", small) == "");
  const auto ns = storage_namespace(65536);
  std::uint64_t most = 0;
  for (std::uint64_t first = 1; first <= 800; first += 16) {
    CHECK(rig.put(ns, first, 16) == 16);  // room is made, not refused
    most = std::max(most, bytes_on_disk(dir.path()));
  }
  // Lock, superblock and the directory's own blocks are beside the segments.
  CHECK(most <= 8 * kMiB + 64 * kKiB);
  const auto stats = rig.backend().stats();
  CHECK(stats.bytes <= 8 * kMiB);
  CHECK(stats.evicted_pages > 0);
  CHECK(stats.pages + stats.evicted_pages == 800);
  CHECK(rig.get(ns, numbers(1, 16)).missing == 16);
  const auto got = rig.get(ns, numbers(785, 16));
  CHECK(got.ok == 16);
  CHECK(got.wrong == 0);
}

TEST_CASE("segment: pages that are read stay when their segment makes room") {
  const TempDir dir;
  StorageRig rig;
  Json small = settings(dir.path());
  small["capacity"] = "6MiB";
  REQUIRE(rig.make("file", small) == "");
  const auto ns = storage_namespace(65536);
  CHECK(rig.put(ns, 1, 4) == 4);
  // Ten times the capacity goes by while these four are read now and then.
  for (std::uint64_t first = 1000; first < 2000; first += 20) {
    CHECK(rig.put(ns, first, 20) == 20);
    const auto got = rig.get(ns, numbers(1, 4));
    CHECK(got.ok == 4);
    CHECK(got.wrong == 0);
  }
  CHECK(rig.backend().stats().evicted_pages > 500);
}

TEST_CASE("segment: nothing wrong is ever read while segments are evicted and written again") {
  for (const std::string& engine : engines()) {
    const TempDir dir;
    StorageRig rig;
    Json small = settings(dir.path(), engine);
    small["capacity"] = "4MiB";
    REQUIRE(rig.make("file", small) == "");
    const auto ns = storage_namespace(40000);
    std::size_t ok = 0;
    for (std::uint64_t round = 0; round < 60; ++round) {
      // Puts and gets in flight at once, from different slots.
      const auto put = rig.submit(StorageOperation::put, ns, numbers(round * 16, 16), 0, 0, 100);
      const std::uint64_t back = round < 4 ? 0 : (round - 4) * 16;
      const auto got = rig.get(ns, numbers(back, 48));
      CHECK(got.wrong == 0);
      CHECK(got.corrupt == 0);
      CHECK(got.other == 0);
      ok += got.ok;
      rig.sink().wait(put);
    }
    CHECK(ok > 500);
    rig.close();
    CHECK(rig.sink().faults() == "");
  }
}

TEST_CASE("segment: clear forgets everything, also for the next start") {
  const TempDir dir;
  StorageRig rig;
  REQUIRE(rig.make("file", settings(dir.path())) == "");
  const auto ns = storage_namespace(50000);
  CHECK(rig.put(ns, 1, 60) == 60);
  rig.close();
  REQUIRE(rig.make("file", settings(dir.path())) == "");
  CHECK(rig.put(ns, 61, 10) == 10);
  REQUIRE(rig.backend().clear());
  CHECK(rig.get(ns, numbers(1, 70)).missing == 70);
  CHECK(rig.backend().stats().pages == 0);
  CHECK(rig.put(ns, 200, 5) == 5);
  CHECK(eventually([&] { return bytes_on_disk(dir.path()) < 3 * kMiB; }));
  rig.close();
  REQUIRE(rig.make("file", settings(dir.path())) == "");
  CHECK(rig.get(ns, numbers(1, 70)).missing == 70);
  CHECK(rig.get(ns, numbers(200, 5)).ok == 5);
}

TEST_CASE("segment: cancel, deadline and close end every page once") {
  for (const std::string& engine : engines()) {
    const TempDir dir;
    StorageRig rig;
    Json slow = settings(dir.path(), engine);
    slow["queue_depth"] = 1;
    slow["workers"] = 1;
    REQUIRE(rig.make("file", slow) == "");
    const auto ns = storage_namespace(4096);
    CHECK(rig.put(ns, 1, 64) == 64);

    // A deadline that has passed: nothing of it begins.
    for (const Status s : rig.sink().wait(rig.submit(StorageOperation::get, ns, numbers(1, 64), 1))) {
      CHECK(s == Status::timed_out);
    }
    std::vector<StorageBatchId> ids;
    const auto get_all = [&] {
      // Each batch has slots of its own: buffers belong to a batch until it ends.
      for (std::uint64_t i = 0; i < 40; ++i) {
        ids.push_back(rig.submit(StorageOperation::get, ns, numbers(1, 64), 0, 0, i * 64));
      }
    };
    get_all();
    for (const auto id : ids) rig.backend().cancel(id);
    std::size_t closed = 0;
    for (const auto id : ids) {
      for (const Status s : rig.sink().wait(id)) {
        CHECK((s == Status::ok || s == Status::closed));
        closed += s == Status::closed;
      }
    }
    CHECK(closed > 0);  // of 2,560 pages in the queue of one transfer at a time
    rig.backend().cancel(StorageBatchId{999999});

    ids.clear();
    get_all();
    rig.close();  // returns with everything ended
    for (const auto id : ids) CHECK(rig.sink().has_ended(id));
    CHECK(rig.sink().faults() == "");
  }
}

TEST_CASE("segment: too many waiting puts are dropped, and the others are kept") {
  const TempDir dir;
  StorageRig rig;
  Json slow = settings(dir.path());
  slow["queue_depth"] = 1;
  slow["workers"] = 1;
  REQUIRE(rig.make("file", slow) == "");
  const auto ns = storage_namespace(4096);
  std::vector<StorageBatchId> ids;
  for (std::uint64_t i = 0; i < 200; ++i)
    ids.push_back(rig.submit(StorageOperation::put, ns, numbers(i * 128, 128)));
  std::size_t ok = 0;
  std::size_t dropped = 0;
  for (const auto id : ids) {
    for (const Status s : rig.sink().wait(id)) {
      ok += s == Status::ok;
      dropped += s == Status::dropped;
    }
  }
  CHECK(ok + dropped == 200 * 128);
  CHECK(ok >= 8192);
}

TEST_CASE("segment: settings that can't be are refused by name, with what was found and expected") {
  StorageRig rig(kMiB);
  const TempDir dir;
  const Json good = settings(dir.path());
  const struct {
    const char* key;
    Json value;
    const char* expected;
  } bad[] = {
      {"format", "zip", "storage.file.format is \"zip\", expected one of \"segment\""},
      {"directories", Json::array(),
       "storage.file.directories is [], expected a list of 1 to 64 absolute paths"},
      {"directories", {"relative"}, "storage.file.directories is [\"relative\"]"},
      {"directories", dir.path(), "expected a list of 1 to 64 absolute paths"},
      {"capacity", "2MiB", "storage.file.capacity is 2MiB, expected 0 or room for 3 segments"},
      {"capacity", "much", "storage.file.capacity is \"much\", expected a number of bytes"},
      {"min_free", -1, "storage.file.min_free is -1"},
      {"segment_bytes", "1KiB", "expected a number of bytes or text such as \"64GiB\", from 256KiB to 64GiB"},
      {"segment_bytes", 1048577, "storage.file.segment_bytes is 1048577, expected a multiple of 4KiB"},
      {"engine", "magic",
       "storage.file.engine is \"magic\", expected one of \"auto\", \"io_uring\", \"threads\""},
      {"workers", 0, "storage.file.workers is 0, expected an integer from 1 to 64"},
      {"queue_depth", 1.5, "storage.file.queue_depth is 1.5"},
      {"registered_buffers", "yes", "storage.file.registered_buffers is \"yes\", expected true or false"},
      {"colour", "red", "storage.file.colour is no key of the backend file"},
  };
  for (const auto& b : bad) {
    Json json = good;
    json[b.key] = b.value;
    const std::string error = rig.make("file", json);
    INFO(error);
    CHECK(error.find("Failed to create storage backend: ") == 0);
    CHECK(error.find(b.expected) != std::string::npos);
  }
  CHECK(rig.make("file", Json::object()).find("storage.file.directories is missing") != std::string::npos);
  CHECK(rig.make("file", good) == "");
}

TEST_CASE("segment: a page that is larger than a segment is dropped") {
  const TempDir dir;
  StorageRig rig;
  REQUIRE(rig.make("file", settings(dir.path())) == "");
  const auto ns = storage_namespace(1 * kMiB);  // and a header: more than 1 MiB
  CHECK(rig.run(StorageOperation::put, ns, {1}) == std::vector<Status>{Status::dropped});
  CHECK(rig.run(StorageOperation::exists, ns, {1}) == std::vector<Status>{Status::not_found});
}

}  // namespace hicache::test
