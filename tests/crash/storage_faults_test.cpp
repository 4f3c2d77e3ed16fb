// Damage to the files of the backend `file` (format segment), full and vanished disks, and death in
// mid-write. What may happen is a miss; what may never happen is a wrong byte, a hang or the end of the
// process.
#include <fcntl.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

#include "shm/fd.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/storage_rig.hpp"

namespace hicache::test {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

Json settings(const std::vector<std::string>& directories) {
  return {{"directories", directories}, {"segment_bytes", "1MiB"}, {"min_free", 0}, {"workers", 2},
          {"queue_depth", 8},           {"retry_ms", 50}};
}

std::vector<std::string> segments_in(const std::string& directory) {
  std::vector<std::string> paths;
  for (const auto& entry : fs::directory_iterator(directory)) {
    if (entry.path().filename().string().rfind("segment-", 0) == 0) paths.push_back(entry.path().string());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

void flip_bit(const std::string& path, std::uint64_t offset) {
  const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  std::uint8_t byte = 0;
  REQUIRE(::pread(fd.get(), &byte, 1, static_cast<off_t>(offset)) == 1);
  byte ^= 0x10;
  REQUIRE(::pwrite(fd.get(), &byte, 1, static_cast<off_t>(offset)) == 1);
}

// Every page in turn: none may be wrong. Returns how many came.
std::size_t come_back(StorageRig& rig, const std::shared_ptr<const StorageNamespace>& ns,
                      std::uint64_t pages) {
  std::size_t ok = 0;
  for (std::uint64_t first = 0; first < pages; first += 32) {
    const auto got = rig.get(ns, numbers(first, std::min<std::uint64_t>(32, pages - first)));
    CHECK(got.wrong == 0);
    CHECK(got.other == 0);
    ok += got.ok;
  }
  return ok;
}

// A file system of its own of that many bytes, or nothing where mounting is not allowed.
class SmallDisk {
 public:
  explicit SmallDisk(const std::string& options) {
    mounted_ = ::mount("hicache-test", dir_.path().c_str(), "tmpfs", 0, options.c_str()) == 0;
  }
  ~SmallDisk() {
    if (mounted_) ::umount2(dir_.path().c_str(), MNT_DETACH);
  }
  [[nodiscard]] bool mounted() const { return mounted_; }
  [[nodiscard]] const std::string& path() const { return dir_.path(); }

 private:
  TempDir dir_;
  bool mounted_ = false;
};

}  // namespace

TEST_CASE("segment faults: a bit that flips on the disk is a miss and is counted") {
  const TempDir dir;
  StorageRig rig;
  const auto ns = storage_namespace(60000);
  REQUIRE(rig.make("file", settings({dir.path()})) == "");
  REQUIRE(rig.put(ns, 0, 10) == 10);
  // The first record's payload, while the backend runs.
  flip_bit(segments_in(dir.path()).front(), 4096 + 4096 + 12345);
  const auto got = rig.get(ns, numbers(0, 10));
  CHECK(got.ok == 9);
  CHECK(got.corrupt == 1);
  CHECK(got.wrong == 0);
  CHECK(rig.backend().stats().corrupt_pages == 1);
  // It is gone then, and can be put again.
  CHECK(rig.get(ns, numbers(0, 10)).missing == 1);
  CHECK(rig.put(ns, 0, 10) == 10);
  CHECK(rig.get(ns, numbers(0, 10)).ok == 10);
}

TEST_CASE("segment faults: a flipped bit anywhere in a directory costs pages and never gives wrong ones") {
  std::mt19937_64 random(20261130);
  const auto ns = storage_namespace(60000, 2);
  const TempDir good;
  StorageRig rig;
  REQUIRE(rig.make("file", settings({good.path()})) == "");
  REQUIRE(rig.put(ns, 0, 40) == 40);
  rig.close();
  std::size_t least = 40;
  for (int round = 0; round < 25; ++round) {
    const TempDir dir;
    for (const std::string& path : segments_in(good.path())) {
      fs::copy_file(path, dir.file(fs::path(path).filename().string()));
    }
    const auto files = segments_in(dir.path());
    const std::string& file = files[random() % files.size()];
    // Half of the flips into what decides: the header, the first record's header, the footer and its trailer.
    const std::array<std::uint64_t, 4> places = {random() % 48, 4096 + random() % 128,
                                                 kMiB - 4096 + random() % 48, kMiB - 8192 + random() % 832};
    const std::uint64_t offset = round % 2 == 0 ? places[random() % places.size()] : random() % kMiB;
    INFO("byte " << offset << " of " << file);
    flip_bit(file, offset);
    REQUIRE(rig.make("file", settings({dir.path()})) == "");
    least = std::min(least, come_back(rig, ns, 40));
    rig.close();
  }
  CHECK(least >= 40 - 9);  // one segment at most, the header's flip
  CHECK(rig.sink().faults() == "");
}

TEST_CASE("segment faults: truncated files and files of others do not stop the start") {
  const TempDir dir;
  StorageRig rig;
  const auto ns = storage_namespace(60000);
  REQUIRE(rig.make("file", settings({dir.path()})) == "");
  REQUIRE(rig.put(ns, 0, 60) == 60);
  rig.close();
  const auto files = segments_in(dir.path());
  REQUIRE(files.size() >= 4);
  fs::resize_file(files[0], 500000);
  fs::resize_file(files[1], 0);
  write_text(dir.file("segment-00000000000000ff.hicache"), "not a segment\n");
  write_text(dir.file("notes.txt"), "somebody's\n");
  fs::create_directory(dir.file("segment-00000000000000fe.hicache"));
  REQUIRE(rig.make("file", settings({dir.path()})) == "");
  const std::size_t ok = come_back(rig, ns, 60);
  CHECK(ok >= 60 - 2 * 15);
  CHECK(ok < 60);
  CHECK(read_text(dir.file("notes.txt")) == "somebody's\n");
  CHECK(rig.put(ns, 100, 30) == 30);
}

TEST_CASE("segment faults: a file that is cut off while it is in use is a miss") {
  const TempDir dir;
  StorageRig rig;
  const auto ns = storage_namespace(60000);
  REQUIRE(rig.make("file", settings({dir.path()})) == "");
  REQUIRE(rig.put(ns, 0, 30) == 30);
  for (const std::string& path : segments_in(dir.path())) fs::resize_file(path, 100 * 1024);
  const auto got = rig.get(ns, numbers(0, 30));
  CHECK(got.wrong == 0);
  CHECK(got.corrupt > 20);
  CHECK(got.ok + got.corrupt + got.missing == 30);
}

TEST_CASE(
    "segment faults: a superblock of another version or a damaged one is refused and nothing is touched") {
  const TempDir dir;
  StorageRig rig;
  const auto ns = storage_namespace(60000);
  REQUIRE(rig.make("file", settings({dir.path()})) == "");
  REQUIRE(rig.put(ns, 0, 10) == 10);
  rig.close();
  const std::string path = dir.file("superblock.hicache");
  const std::string original = read_text(path);
  std::string later = original;
  later[8] = 7;
  write_text(path, later);
  std::string error = rig.make("file", settings({dir.path()}));
  INFO(error);
  CHECK(error.find(dir.path()) != std::string::npos);
  CHECK(error.find("format version 7, this build knows 1") != std::string::npos);
  for (const std::string& text : {std::string("garbage"), std::string(), original.substr(0, 20),
                                  original.substr(0, 16) + "x" + original.substr(17)}) {
    write_text(path, text);
    error = rig.make("file", settings({dir.path()}));
    INFO(error);
    CHECK(error.find("superblock of " + dir.path()) != std::string::npos);
    CHECK(error.find("start afresh") != std::string::npos);
  }
  write_text(path, original);
  REQUIRE(rig.make("file", settings({dir.path()})) == "");
  CHECK(come_back(rig, ns, 10) == 10);
}

TEST_CASE("segment faults: a directory has one owner") {
  const TempDir dir;
  StorageRig first;
  REQUIRE(first.make("file", settings({dir.path()})) == "");
  StorageRig second;
  std::string error = second.make("file", settings({dir.path()}));
  CHECK(error.find(dir.path() + " is in use by process " + std::to_string(::getpid())) != std::string::npos);
  // Another process: the lock ends with it, however it ends.
  first.close();
  Child owner = Child::run([&] {
    StorageRig rig;
    if (!rig.make("file", settings({dir.path()})).empty()) return 1;
    ::dprintf(STDOUT_FILENO, "locked\n");
    ::pause();
    return 0;
  });
  REQUIRE(owner.read_line() == "locked");
  error = second.make("file", settings({dir.path()}));
  CHECK(error.find("is in use by process " + std::to_string(owner.pid())) != std::string::npos);
  owner.kill(SIGKILL);
  REQUIRE(owner.wait());
  CHECK(second.make("file", settings({dir.path()})) == "");
  CHECK(second.make("file", settings({dir.path(), dir.path()})).find("is in use by process") !=
        std::string::npos);
}

TEST_CASE("segment faults: killed in mid-write, pages that were committed come back and none is wrong") {
  for (const std::string engine : {"auto", "threads"}) {
    const TempDir dir;
    const auto ns = storage_namespace(50000, 2);
    std::size_t back = 0;
    std::size_t committed = 0;
    for (std::uint64_t round = 0; round < 4; ++round) {
      const std::uint64_t base = round * 10'000;
      Json options = settings({dir.path()});
      options["engine"] = engine;
      Child writer = Child::run([&] {
        StorageRig rig(64 * kMiB);
        if (!rig.make("file", options).empty()) return 1;
        // Four batches in flight at all times; a line for each that has ended.
        std::array<StorageBatchId, 4> ids;
        for (std::uint64_t i = 0;; ++i) {
          if (i >= 4) {
            rig.sink().wait(ids[i % 4]);
            ::dprintf(STDOUT_FILENO, "ended %llu\n", static_cast<unsigned long long>(i - 4));
          }
          ids[i % 4] = rig.submit(StorageOperation::put, ns, numbers(base + i * 8, 8), 0, 0, i % 4 * 8);
        }
      });
      std::vector<std::uint64_t> ended;
      // Its other lines are the log.
      const auto note = [&](const std::string& line) {
        if (line.rfind("ended ", 0) == 0) ended.push_back(std::stoull(line.substr(6)));
      };
      while (ended.size() < 5 + round * 3) {
        const auto line = writer.read_line();
        REQUIRE(line);
        note(*line);
      }
      writer.kill(SIGKILL);
      REQUIRE(writer.wait());
      while (const auto line = writer.read_line(1000)) note(*line);

      StorageRig rig;
      REQUIRE(rig.make("file", options) == "");
      for (const std::uint64_t batch : ended) {
        const auto got = rig.get(ns, numbers(base + batch * 8, 8));
        CHECK(got.ok == 8);
        CHECK(got.wrong == 0);
        back += got.ok;
        committed += 8;
      }
      // What was in flight may be there or not, but not wrong, and not half.
      const auto rest = rig.get(ns, numbers(base + (ended.back() + 1) * 8, 32));
      CHECK(rest.wrong == 0);
      CHECK(rest.corrupt == 0);
    }
    CHECK(committed >= 4 * 5 * 8);
    CHECK(back == committed);
  }
}

TEST_CASE("segment faults: a full disk refuses pages, keeps the old ones, and goes on when there is room") {
  const SmallDisk disk("size=6m");
  if (!disk.mounted()) {
    WARN("no small file system: mounting needs root; not tested");
    return;
  }
  StorageRig rig;
  const auto ns = storage_namespace(60000);
  // Somebody else's file takes what is left: there is never room for a second segment.
  write_text(disk.path() + "/other", std::string(4400 * 1024, 'x'));
  REQUIRE(rig.make("file", settings({disk.path()})) == "");
  const std::size_t kept = rig.put(ns, 0, 64);
  CHECK(kept >= 10);
  CHECK(kept < 64);
  CHECK(come_back(rig, ns, 64) >= 1);
  CHECK(rig.backend().health().usable);
  fs::remove(disk.path() + "/other");
  CHECK(eventually([&] { return rig.put(ns, 1000, 32) == 32; }));
  CHECK(rig.get(ns, numbers(1000, 32)).wrong == 0);
}

TEST_CASE("segment faults: the free space that others were promised is given back") {
  const SmallDisk disk("size=16m");
  if (!disk.mounted()) {
    WARN("no small file system: mounting needs root; not tested");
    return;
  }
  StorageRig rig;
  Json options = settings({disk.path()});
  options["min_free"] = "4MiB";
  const auto ns = storage_namespace(60000);
  REQUIRE(rig.make("file", options) == "");
  CHECK(rig.put(ns, 0, 320) == 320);
  const auto free = [&] { return fs::space(disk.path()).available; };
  CHECK(eventually([&] { return free() >= 4 * kMiB; }));
  // Somebody else takes 3 MiB: segments go until the promise holds again.
  write_text(disk.path() + "/other", std::string(3 * kMiB, 'x'));
  CHECK(eventually([&] { return free() >= 4 * kMiB; }));
  CHECK(rig.put(ns, 1000, 64) == 64);
  const auto got = rig.get(ns, numbers(1060, 4));
  CHECK(got.ok == 4);
  CHECK(got.wrong == 0);
}

// A backend at work may put a new file into the directory while it is being removed.
void remove_under_it(const std::string& directory) {
  CHECK(eventually([&] {
    std::error_code error;
    fs::remove_all(directory, error);
    return !fs::exists(directory);
  }));
}

TEST_CASE("segment faults: a directory that is removed is given up, and the other one serves") {
  const TempDir parent;
  const TempDir other;
  const std::string doomed = parent.file("doomed");
  StorageRig rig;
  const auto ns = storage_namespace(60000);
  REQUIRE(rig.make("file", settings({doomed, other.path()})) == "");
  REQUIRE(rig.put(ns, 0, 64) == 64);
  remove_under_it(doomed);
  CHECK(eventually(
      [&] { return rig.backend().health().text.find(doomed + ": is gone") != std::string::npos; }));
  CHECK(rig.backend().health().usable);
  const std::size_t ok = come_back(rig, ns, 64);
  CHECK(ok > 0);
  CHECK(ok < 64);
  CHECK(rig.put(ns, 100, 64) == 64);
  CHECK(rig.get(ns, numbers(100, 64)).ok == 64);
  // The only one gone: nothing can be used, and that is said, not hung.
  remove_under_it(other.path());
  CHECK(eventually([&] { return !rig.backend().health().usable; }));
  CHECK(rig.put(ns, 200, 4) == 0);
  CHECK(rig.get(ns, numbers(100, 4)).missing == 4);
}

TEST_CASE("segment faults: a directory made read-only keeps its pages readable") {
  const TempDir dir;
  if (::geteuid() != 0) {
    WARN("not root: the permissions are tested as they are");
  } else {
    REQUIRE(::chmod(dir.path().c_str(), 0777) == 0);
  }
  // Root is not bound by permissions: a child without its rights is.
  Child child = Child::run([&] {
    if (::geteuid() == 0 && (::setgid(65534) != 0 || ::setuid(65534) != 0)) return 1;
    StorageRig rig;
    const std::string mine = dir.file("mine");
    if (!rig.make("file", settings({mine})).empty()) return 2;
    const auto ns = storage_namespace(60000);
    if (rig.put(ns, 0, 20) != 20) return 3;
    if (::chmod(mine.c_str(), 0500) != 0) return 4;
    // Open and spare segments still take pages; then there is no further one.
    const std::size_t kept = rig.put(ns, 100, 200);
    if (kept == 200) return 5;
    const auto got = rig.get(ns, numbers(0, 20));
    if (got.ok != 20 || got.wrong != 0) return 6;
    if (rig.backend().health().text.find("Permission denied") == std::string::npos) return 7;
    if (::chmod(mine.c_str(), 0700) != 0) return 8;
    return eventually([&] { return rig.put(ns, 1000, 64) == 64; }) ? 0 : 9;
  });
  const auto status = child.wait();
  REQUIRE(status);
  INFO(child.error_text());
  CHECK(status->signal == 0);
  CHECK(status->code == 0);
}

TEST_CASE("segment faults: a directory with many I/O errors is left alone, and used again when it works") {
  const TempDir dir;
  // A limit of file sizes makes every write fail with a real error of the kernel; it holds for a process.
  Child child = Child::run([&] {
    StorageRig rig;
    Json options = settings({dir.path()});
    options["max_errors"] = 4;
    options["retry_ms"] = 300;
    if (!rig.make("file", options).empty()) return 1;
    const auto ns = storage_namespace(60000);
    if (rig.put(ns, 0, 10) != 10) return 2;
    ::signal(SIGXFSZ, SIG_IGN);
    rlimit limit{};
    ::getrlimit(RLIMIT_FSIZE, &limit);
    const rlim_t before = std::exchange(limit.rlim_cur, 512);
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 3;
    for (std::uint64_t page = 100; page < 104; ++page) {
      if (rig.run(StorageOperation::put, ns, {page}) != std::vector<Status>{Status::system_error}) return 4;
    }
    // Given up: no page of it is there for now, and nothing is tried.
    if (rig.backend().health().usable) return 5;
    if (rig.backend().health().text.find("File too large") == std::string::npos) return 6;
    if (rig.run(StorageOperation::put, ns, {200}) != std::vector<Status>{Status::no_space}) return 7;
    if (rig.get(ns, numbers(0, 10)).missing != 10) return 8;
    if (rig.backend().stats().failed_operations < 4) return 9;
    limit.rlim_cur = before;
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 10;
    if (!eventually([&] { return rig.backend().health().usable; })) return 11;
    const auto got = rig.get(ns, numbers(0, 10));
    if (got.ok != 10 || got.wrong != 0) return 12;
    return rig.put(ns, 300, 20) == 20 ? 0 : 13;
  });
  const auto status = child.wait();
  REQUIRE(status);
  INFO(child.error_text());
  CHECK(status->signal == 0);
  CHECK(status->code == 0);
}

TEST_CASE("segment faults: without the right to lock memory pages go unregistered, and that is said") {
  const TempDir dir;
  Json options = settings({dir.file("mine")});
  options["engine"] = "io_uring";
  {
    StorageRig rig;
    const std::string error = rig.make("file", options);
    if (!error.empty()) {
      WARN("not tested: " << error);
      return;
    }
    const auto registered = [&] {
      return rig.backend().health().text.find("registered buffers") != std::string::npos;
    };
    if (::geteuid() == 0) CHECK(eventually(registered));  // root may lock what it likes
    rig.close();
    fs::remove_all(dir.file("mine"));
  }
  if (::geteuid() == 0) REQUIRE(::chmod(dir.path().c_str(), 0777) == 0);
  Child child = Child::run([&] {
    const rlimit limit{64 * kKiB, 64 * kKiB};
    if (::setrlimit(RLIMIT_MEMLOCK, &limit) != 0) return 1;
    if (::geteuid() == 0 && (::setgid(65534) != 0 || ::setuid(65534) != 0)) return 2;
    StorageRig rig;
    if (!rig.make("file", options).empty()) return 3;
    const auto ns = storage_namespace(600'000);
    if (rig.put(ns, 0, 20) != 20) return 4;
    const auto got = rig.get(ns, numbers(0, 20));
    if (got.ok != 20 || got.wrong != 0) return 5;
    const std::string text = rig.backend().health().text;
    return text.find("buffers not registered") != std::string::npos && rig.backend().health().usable ? 0 : 6;
  });
  const auto status = child.wait();
  REQUIRE(status);
  INFO(child.error_text());
  CHECK(status->signal == 0);
  CHECK(status->code == 0);
}

TEST_CASE("segment faults: a directory that can't be used at all is refused with the reason") {
  StorageRig rig;
  const TempDir dir;
  write_text(dir.file("file"), "x");
  CHECK(rig.make("file", settings({dir.file("file")})).find(dir.file("file")) != std::string::npos);
  CHECK(rig.make("file", settings({dir.file("no/such/parent")})).find("No such file or directory") !=
        std::string::npos);
}

}  // namespace hicache::test
