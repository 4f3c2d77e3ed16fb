// What people and other programs do to a daemon that runs: remove its files, fill its file system, stop
// reading its log. It serves on, and says what is wrong.
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/crash/crash_rig.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/test_rank.hpp"

using namespace hicache;
using namespace hicache::test;

namespace {

const NamespaceSpec kSpec = small_spec(Attention::mha, 1);
constexpr std::uint32_t kPages = 8;  // of a prompt

// Writes a prompt that is not there yet and reads it back.
bool works(TestRank& rank, std::uint64_t sequence, std::uint32_t id) {
  const auto hashes = prompt(id, kPages);
  if (write_prompt(rank, sequence, hashes) != kPages) return false;
  const ReadBack read = read_back(rank, sequence + 1, hashes);
  return read.hits == kPages && read.wrong == 0;
}

}  // namespace

TEST_CASE("a daemon whose names in /dev/shm were removed serves old clients and new ones") {
  TestDaemon daemon;
  TestRank before(daemon, "before", 0, kSpec);
  REQUIRE(works(before, 1, 1));
  remove_shm_leftovers(daemon.name());
  CHECK(works(before, 11, 2));
  TestRank after(daemon, "after", 0, kSpec);
  CHECK(works(after, 1, 3));
  CHECK(read_back(after, 11, prompt(1, kPages)).hits == kPages);

  // Nobody can tell any more that its name is taken, but its socket is.
  const auto second = run_program({program("hicached"), "--config", daemon.config_path(), "--foreground"});
  CHECK_FALSE(second.status.exited_with(0));
  CHECK(second.err.find("another process does already") != std::string::npos);
  CHECK(works(before, 21, 4));

  // With another socket a second one starts. What it has made stays when the first one goes.
  const TempDir dir;
  auto config = nlohmann::json::parse(read_text(daemon.config_path()));
  config["socket"]["path"] = dir.file("socket");
  write_text(dir.file("config"), config.dump());
  Child other = Child::spawn({program("hicached"), "--config", dir.file("config"), "--foreground"});
  REQUIRE(other.read_line().has_value());
  CHECK(works(before, 31, 5));
  CHECK(daemon.stop() == 0);
  CHECK(shm_leftovers(daemon.name()).size() == 3);
  CHECK(dump_findings(daemon.name()) == "");
  CHECK(control(dir.file("socket"), {"status"}, kPatienceMs).ok());
  other.kill(SIGTERM);
  const auto end = other.wait();
  CHECK((end && end->exited_with(0)));
  CHECK(shm_leftovers(daemon.name()).empty());
}

TEST_CASE("a socket that somebody removes is there again, and nobody attached notices") {
  TestDaemon daemon;
  TestRank before(daemon, "before", 0, kSpec);
  struct stat made {};
  REQUIRE(::stat(daemon.socket_path().c_str(), &made) == 0);
  CHECK((made.st_mode & 0777) == 0600);
  for (std::uint32_t time = 0; time < 2; ++time) {
    INFO(time);
    REQUIRE(::unlink(daemon.socket_path().c_str()) == 0);
    CHECK(works(before, 100 * time + 1, 10 + time));
    REQUIRE(eventually([&] { return control(daemon.socket_path(), {"status"}, kPatienceMs).ok(); }));
    struct stat again {};
    REQUIRE(::stat(daemon.socket_path().c_str(), &again) == 0);
    CHECK(again.st_mode == made.st_mode);
    TestRank after(daemon, "after", 0, kSpec);
    CHECK(works(after, 1, 20 + time));
    CHECK(daemon.log().find("was removed; clients find it there again") != std::string::npos);
  }
  CHECK(daemon.stop() == 0);
  CHECK_FALSE(std::filesystem::exists(daemon.socket_path()));
}

TEST_CASE("a file in the place of the removed socket is left alone, and the log says so") {
  TestDaemon daemon;
  TestRank before(daemon, "before", 0, kSpec);
  REQUIRE(::unlink(daemon.socket_path().c_str()) == 0);
  write_text(daemon.socket_path(), "somebody's");
  REQUIRE(eventually([&] { return daemon.log().find("no client can attach") != std::string::npos; }));
  CHECK(daemon.log().find("found another file") != std::string::npos);
  CHECK(works(before, 1, 1));
  CHECK(read_text(daemon.socket_path()) == "somebody's");
  REQUIRE(::unlink(daemon.socket_path().c_str()) == 0);
  CHECK(eventually([&] { return control(daemon.socket_path(), {"status"}, kPatienceMs).ok(); }));
  write_text(daemon.socket_path() + ".new", "another's");
  REQUIRE(::rename((daemon.socket_path() + ".new").c_str(), daemon.socket_path().c_str()) == 0);
  CHECK(daemon.stop() == 0);
  CHECK(read_text(daemon.socket_path()) == "another's");
}

TEST_CASE("models that come and go make room for each other, and one in use stays") {
  TestDaemon daemon(R"({"limits": {"namespaces": 4}})");
  const auto spec_of = [](int number) {
    NamespaceSpec spec = kSpec;
    spec.model = "model-" + std::to_string(number);
    return spec;
  };
  TestRank stays(daemon, "stays", 0, spec_of(0));
  REQUIRE(works(stays, 1, 1));
  for (int number = 1; number < 20; ++number) {
    INFO(number);
    TestRank rank(daemon, "engine", 0, spec_of(number));
    CHECK(works(rank, 1, 1));
  }
  // The latest ones are there with their pages, the oldest but one is not.
  for (const int number : {18, 19}) {
    INFO(number);
    TestRank rank(daemon, "engine", 0, spec_of(number));
    const ReadBack read = read_back(rank, 1, prompt(1, kPages));
    CHECK(read.hits == kPages);
    CHECK(read.wrong == 0);
  }
  CHECK(read_back(stays, 11, prompt(1, kPages)).hits == kPages);
  CHECK(daemon.log().find("makes room for another one") != std::string::npos);
  {
    TestRank rank(daemon, "engine", 0, spec_of(1));
    CHECK(rank.session().probe(prompt(1, kPages)).leading == 0);
  }
  // All in use: refused as ever.
  std::vector<std::unique_ptr<TestRank>> ranks;
  for (int number = 30; number < 33; ++number)
    ranks.push_back(std::make_unique<TestRank>(daemon, "engine", 0, spec_of(number)));
  AttachOptions options;
  options.socket_path = daemon.socket_path();
  options.engine = "one more";
  options.spec = spec_of(40);
  const auto refused = Session::attach(options);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().message.find("raise limits.namespaces") != std::string::npos);
  CHECK(works(stays, 21, 2));
  CHECK(dump_findings(daemon.name()) == "");
}

TEST_CASE("a log that nobody reads loses lines and says so, and holds up nobody") {
  TestDaemon daemon;
  REQUIRE(daemon.stop() == 0);
  const TempDir dir;
  const std::string fifo = dir.file("log");
  REQUIRE(::mkfifo(fifo.c_str(), 0600) == 0);
  const UniqueFd reader(::open(fifo.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  const UniqueFd writer(::open(fifo.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC));
  REQUIRE((reader.valid() && writer.valid()));
  // The same pipe for the daemon, where a write waits for room.
  Child child = Child::spawn(
      {"/bin/sh", "-c",
       "exec " + program("hicached") + " --config " + daemon.config_path() + " --foreground 2>" + fifo});
  REQUIRE(child.read_line().has_value());
  const std::string piece(4096, '.');
  while (::write(writer.get(), piece.data(), piece.size()) > 0) {
  }
  // Each of these is worth a line.
  for (std::uint32_t i = 0; i < 4; ++i) {
    Child rank = Child::run([&] {
      TestRank one(daemon, "engine", 0, kSpec);
      return works(one, 1, i) ? 0 : 1;
    });
    const auto end = rank.wait();
    REQUIRE((end && end->exited_with(0)));
  }
  // Now somebody reads.
  std::string seen;
  const auto drain = [&] {
    char buffer[8192];
    for (ssize_t n = 0; (n = ::read(reader.get(), buffer, sizeof buffer)) > 0;)
      seen.append(buffer, static_cast<std::size_t>(n));
    return seen.find("lines of the log were lost, nobody read it") != std::string::npos;
  };
  static_cast<void>(drain());
  child.kill(SIGHUP);  // and there is something to say
  CHECK(eventually(drain));
  child.kill(SIGTERM);
  const auto end = child.wait();
  CHECK((end && end->exited_with(0)));
}

TEST_CASE("/dev/shm without a free byte: what runs goes on, attaches, and survives a kill") {
  // In a name space of its own: a small file system in the place of the machine's.
  Child child = Child::run([&]() -> int {
    if (::unshare(CLONE_NEWNS) != 0 || ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=40m") != 0) {
      std::printf("SKIPPED: no file system of the test's own: %s\n", std::strerror(errno));
      std::fflush(stdout);
      return 77;
    }
    const auto expect = [](bool met, const char* what) {
      if (!met) throw std::runtime_error(what);
    };
    try {
      TestDaemon daemon(R"({"pool": {"bytes": "16MiB", "segment_bytes": "1MiB"}})");
      {
        TestRank rank(daemon, "engine", 0, kSpec);
        expect(works(rank, 1, 1), "it does not work at all");
        const int filler = ::open("/dev/shm/filler", O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
        const std::string zeros(4096, '\0');
        while (::write(filler, zeros.data(), zeros.size()) > 0) {
        }
        expect(errno == ENOSPC, "the file system is not full");
        ::close(filler);
        // Twice what the pool holds: every page of it is written to.
        const auto slots = 2 * 16 * kMiB / kSpec.slot_bytes();
        for (std::uint32_t i = 0; i < slots / kPages; ++i)
          expect(works(rank, 10 * i + 11, 100 + i), "it does not work any more");
        TestRank other(daemon, "other", 0, kSpec);
        expect(works(other, 1, 2), "another one can't attach");
      }
      daemon.kill9();
      daemon.start();
      TestRank rank(daemon, "engine", 0, kSpec);
      const ReadBack read = read_back(rank, 1, prompt(2, kPages));
      expect(read.hits == kPages && read.wrong == 0, "what was ready is not there");
      expect(works(rank, 11, 3), "it does not work after the takeover");
      expect(dump_findings(daemon.name()).empty(), "the region is not sound");
      expect(daemon.stop() == 0, "it does not stop");
      // A fresh region has no room now, and that is said.
      const auto fresh = run_program({program("hicached"), "--config", daemon.config_path(), "--foreground"});
      expect(!fresh.status.exited_with(0) && fresh.err.find("/dev/shm: ") != std::string::npos,
             "a daemon without room for its pool is not refused");
    } catch (const std::exception& e) {
      std::printf("%s\n", e.what());
      std::fflush(stdout);
      return 1;
    }
    return 0;
  });
  const std::string said = child.read_all();
  const auto end = child.wait();
  INFO(said);
  REQUIRE(end.has_value());
  if (end->exited_with(77)) {
    WARN(said);
    return;
  }
  CHECK(end->exited_with(0));
}
