// hicached as a program: its command line, its life and its end, and what it leaves behind.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <string>

#include "hicache/client.hpp"
#include "shm/region.hpp"
#include "shm/shared_memory.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/processes.hpp"

using namespace hicache;
using namespace hicache::test;

namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// The header of a daemon's control region, as a tool reads it.
RegionCheck check_region(const std::string& name, std::uint64_t* epoch = nullptr) {
  const auto fd = open_named(control_object_name(name), Mapping::Access::read_only);
  if (!fd) return {};
  std::vector<std::uint8_t> bytes(sizeof(RegionHeader));
  if (::pread(fd->get(), bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) return {};
  if (epoch != nullptr)
    std::memcpy(epoch, bytes.data() + offsetof(RegionHeader, instance_epoch), sizeof *epoch);
  return check_header(bytes, *object_size(fd->get()));
}

bool exists(const std::string& path) {
  return ::access(path.c_str(), F_OK) == 0;
}

}  // namespace

TEST_CASE("a limit of open files that its clients would exceed is refused at the start, with the remedy") {
  TestDaemon daemon;
  CHECK(daemon.stop() == 0);
  const std::string command =
      "ulimit -n 100; exec " + program("hicached") + " --config " + daemon.config_path() + " --foreground";
  const auto run = run_program({"/bin/sh", "-c", command});
  CHECK(run.status.exited_with(1));
  CHECK(run.err.find("open files: hard limit 100, limits.clients 64 needs 320 at least") !=
        std::string::npos);
  CHECK(run.err.find("ulimit -n") != std::string::npos);
  CHECK(shm_leftovers(daemon.name()).empty());
}

TEST_CASE(
    "a daemon announces itself with one line, makes a usable region, and takes everything away on SIGTERM") {
  TestDaemon daemon;
  CHECK(daemon.ready_line() ==
        "hicached " + daemon.name() + " ready socket=" + daemon.socket_path() + " pool=67108864 pages=4096");
  const RegionCheck check = check_region(daemon.name());
  INFO((check.findings.empty() ? std::string() : check.findings.front()));
  CHECK(check.verdict == RegionVerdict::usable);
  CHECK(check.plan.section(SectionKind::pages).entries == 4096);
  CHECK(shm_leftovers(daemon.name()).size() == 3);
  const auto status = control(daemon.socket_path(), {"status"});
  REQUIRE(status.ok());
  CHECK(contains(*status, daemon.name()));
  CHECK(daemon.stop() == 0);
  CHECK(shm_leftovers(daemon.name()).empty());
  CHECK_FALSE(exists(daemon.socket_path()));
}

TEST_CASE("SIGINT ends a daemon like SIGTERM") {
  TestDaemon daemon;
  daemon.child().kill(SIGINT);
  const auto status = daemon.child().wait();
  REQUIRE(status.has_value());
  CHECK(status->exited_with(0));
  CHECK(shm_leftovers(daemon.name()).empty());
}

TEST_CASE("region.keep_on_exit leaves a closed region behind that the next daemon takes over") {
  TestDaemon daemon(R"({"region": {"keep_on_exit": true}})");
  std::uint64_t first = 0;
  std::uint64_t second = 0;
  check_region(daemon.name(), &first);
  CHECK(daemon.stop() == 0);
  CHECK(check_region(daemon.name()).verdict == RegionVerdict::usable);
  daemon.start();
  CHECK(check_region(daemon.name(), &second).verdict == RegionVerdict::usable);
  CHECK(first != second);
}

TEST_CASE("--check-config answers 0 for a good file and 2 with every fault for a bad one") {
  TempDir dir;
  write_text(dir.file("good.json"), R"({"name": "good"})");
  write_text(dir.file("bad.json"), R"({"pool": {"byts": 1, "segment_bytes": "5MiB"}})");
  const auto good = run_program({program("hicached"), "--config", dir.file("good.json"), "--check-config"});
  CHECK(good.status.exited_with(0));
  CHECK(contains(good.out, "ok"));
  const auto bad = run_program({program("hicached"), "--config", dir.file("bad.json"), "--check-config"});
  CHECK(bad.status.exited_with(2));
  CHECK(contains(bad.err, "bad.json"));
  CHECK(contains(bad.err, "pool.byts: unknown key"));
  CHECK(contains(bad.err, "pool.segment_bytes: found \"5MiB\", expected"));
  const auto missing =
      run_program({program("hicached"), "--config", dir.file("none.json"), "--check-config"});
  CHECK(missing.status.exited_with(2));
  CHECK(contains(missing.err, "none.json"));
  CHECK(run_program({program("hicached")}).status.exited_with(2));
  CHECK(run_program({program("hicached"), "--no-such-option"}).status.exited_with(2));
}

TEST_CASE("--print-config prints a file that --check-config accepts") {
  TempDir dir;
  const auto printed = run_program({program("hicached"), "--print-config"});
  REQUIRE(printed.status.exited_with(0));
  write_text(dir.file("printed.json"), printed.out);
  CHECK(run_program({program("hicached"), "--config", dir.file("printed.json"), "--check-config"})
            .status.exited_with(0));
}

TEST_CASE("every program says its version, protocol and layout") {
  for (const char* name : {"hicached", "hicache-ctl", "hicache-dump", "hicache-top", "hicache-bench"}) {
    const auto printed = run_program({program(name), "--version"});
    CHECK(printed.status.exited_with(0));
    CHECK(contains(printed.out, std::string(name) + " "));
    CHECK(contains(printed.out, "protocol 1"));
    CHECK(contains(printed.out, "layout 1"));
  }
}

TEST_CASE("a second daemon of a name is refused and the first one goes on") {
  TestDaemon daemon;
  const auto second = run_program({program("hicached"), "--config", daemon.config_path(), "--foreground"});
  CHECK(second.status.exited_with(1));
  CHECK(contains(second.err, daemon.name()));
  CHECK(contains(second.err, std::to_string(daemon.pid())));
  CHECK(control(daemon.socket_path(), {"status"}).ok());
  CHECK(daemon.stop() == 0);
}

TEST_CASE("a daemon takes neither the socket of a living one nor the place of a file") {
  TestDaemon daemon;
  TempDir dir;
  const std::string name = unique_region_name();
  const auto start_at = [&](const std::string& socket) {
    write_text(dir.file("other.json"), R"({"name": ")" + name +
                                           R"(", "pool": {"bytes": "64KiB", "segment_bytes": "64KiB"},
    "log": {"file": ")" + dir.file("log") + R"("}, "socket": {"path": ")" +
                                           socket + R"("}})");
    return run_program({program("hicached"), "--config", dir.file("other.json"), "--foreground"});
  };
  const auto thief = start_at(daemon.socket_path());
  CHECK(thief.status.exited_with(1));
  CHECK(contains(thief.err, daemon.socket_path()));
  CHECK(contains(thief.err, "socket.path"));  // also where the log goes to a file
  CHECK(contains(read_text(dir.file("log")), "socket.path"));
  CHECK(control(daemon.socket_path(), {"status"}).ok());
  CHECK(daemon.stop() == 0);

  write_text(dir.file("precious"), "text");
  const auto careless = start_at(dir.file("precious"));
  CHECK(careless.status.exited_with(1));
  CHECK(contains(careless.err, dir.file("precious")));
  CHECK(read_text(dir.file("precious")) == "text");
  CHECK(shm_leftovers(name).empty());
}

TEST_CASE("a pool that does not fit /dev/shm is refused with what is free and what to do") {
  TempDir dir;
  const std::string name = unique_region_name();
  write_text(dir.file("big.json"), R"({"name": ")" + name +
                                       R"(", "pool": {"bytes": "60TiB", "segment_bytes": "1GiB"},
    "socket": {"path": ")" + dir.file("s.sock") +
                                       R"("}})");
  const auto run = run_program({program("hicached"), "--config", dir.file("big.json"), "--foreground"});
  CHECK(run.status.exited_with(1));
  CHECK(contains(run.err, "/dev/shm"));
  CHECK(contains(run.err, "pool.bytes"));
  CHECK(shm_leftovers(name).empty());
}

TEST_CASE("AC-22 a pool that would eat the reserve of the memory is refused at start, with the figures") {
  TempDir dir;
  const std::string name = unique_region_name();
  write_text(dir.file("reserve.json"), R"({"name": ")" + name +
                                           R"(", "pool": {"bytes": "16MiB", "memory_reserve": "60TiB"},
    "socket": {"path": ")" + dir.file("s.sock") +
                                           R"("}})");
  const auto run = run_program({program("hicached"), "--config", dir.file("reserve.json"), "--foreground"});
  CHECK(run.status.exited_with(1));
  CHECK(contains(run.err, "pool.memory_reserve keeps 60 TiB"));
  CHECK(contains(run.err, "lower pool.bytes or pool.memory_reserve"));
  CHECK(shm_leftovers(name).empty());
}

TEST_CASE("the region of a killed daemon is taken over, and the log says so") {
  TestDaemon daemon;
  daemon.kill9();
  CHECK_FALSE(shm_leftovers(daemon.name()).empty());
  CHECK(exists(daemon.socket_path()));
  daemon.start();
  CHECK(contains(daemon.log(), "took the region over"));
  CHECK(check_region(daemon.name()).verdict == RegionVerdict::usable);
  CHECK(control(daemon.socket_path(), {"status"}).ok());
  CHECK(daemon.stop() == 0);
  CHECK(shm_leftovers(daemon.name()).empty());
}

TEST_CASE("garbage under a daemon's names is replaced") {
  TestDaemon daemon;
  REQUIRE(daemon.stop() == 0);
  write_text("/dev/shm/" + control_object_name(daemon.name()), "not a region");
  write_text("/dev/shm/" + pool_object_name(daemon.name(), 0), "");
  daemon.start();
  CHECK(check_region(daemon.name()).verdict == RegionVerdict::usable);
}

TEST_CASE("SIGHUP takes the keys that may change and refuses a file that changes others") {
  TestDaemon daemon;
  daemon.write_config(R"({"limits": {"hello_deadline_ms": 1234}})");
  daemon.child().kill(SIGHUP);
  REQUIRE(
      eventually([&] { return contains(daemon.log(), "configuration reloaded: limits.hello_deadline_ms"); }));
  CHECK(contains(daemon.log(), "5000 -> 1234"));
  REQUIRE(eventually([&] {
    const auto config = control(daemon.socket_path(), {"config"});
    return config.ok() && contains(*config, "1234");
  }));

  daemon.write_config(R"({"transfer": {"threads": 5}, "limits": {"hello_deadline_ms": 4321}})");
  daemon.child().kill(SIGHUP);
  REQUIRE(eventually([&] { return contains(daemon.log(), "not reloaded: transfer.threads"); }));
  write_text(daemon.config_path(), "{");
  daemon.child().kill(SIGHUP);
  REQUIRE(eventually([&] { return contains(daemon.log(), "is not JSON"); }));
  const auto config = control(daemon.socket_path(), {"config"});
  REQUIRE(config.ok());
  CHECK(contains(*config, "1234"));
  CHECK_FALSE(contains(*config, "4321"));
  CHECK(daemon.stop() == 0);
}

TEST_CASE("without --foreground the program returns once the daemon is ready") {
  TestDaemon daemon;
  REQUIRE(daemon.stop() == 0);
  const auto run = run_program({program("hicached"), "--config", daemon.config_path()});
  REQUIRE(run.status.exited_with(0));
  CHECK(contains(run.out, "hicached " + daemon.name() + " ready"));
  const std::string pid = read_text("/dev/shm/hicache." + daemon.name() + ".lock");
  REQUIRE_FALSE(pid.empty());
  const auto detached = static_cast<pid_t>(std::stol(pid));
  CHECK(control(daemon.socket_path(), {"status"}).ok());
  // Another one fails at once, with its reason on standard error.
  const auto second = run_program({program("hicached"), "--config", daemon.config_path()});
  CHECK(second.status.exited_with(1));
  CHECK(contains(second.err, "already running"));
  ::kill(detached, SIGTERM);
  CHECK(eventually([&] { return shm_leftovers(daemon.name()).empty(); }));
}

TEST_CASE("a service manager hears when the daemon is ready and when it stops") {
  TempDir dir;
  const std::string path = dir.file("notify");
  UniqueFd manager(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  REQUIRE(::bind(manager.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  const timeval patience{kPatienceMs / 1000, 0};
  REQUIRE(::setsockopt(manager.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience) == 0);
  const auto next = [&] {
    char text[256] = {};
    const ssize_t n = ::recv(manager.get(), text, sizeof text, 0);
    return std::string(text, n > 0 ? static_cast<std::size_t>(n) : 0);
  };
  TestDaemon daemon;
  REQUIRE(daemon.stop() == 0);
  Child child = Child::spawn({program("hicached"), "--config", daemon.config_path(), "--foreground"},
                             {"NOTIFY_SOCKET=" + path});
  CHECK(next() == "READY=1\nMAINPID=" + std::to_string(child.pid()));
  child.kill(SIGTERM);
  CHECK(next() == "STOPPING=1");
  const auto status = child.wait();
  REQUIRE(status.has_value());
  CHECK(status->exited_with(0));
}

TEST_CASE("hicache-ctl finds a daemon by name and says in its exit status how it went") {
  TestDaemon daemon;
  const auto ctl = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {program("hicache-ctl"), daemon.name()});
    return run_program(arguments);
  };
  const auto status = ctl({"status"});
  CHECK(status.status.exited_with(0));
  CHECK(contains(status.out, "daemon " + daemon.name()));
  CHECK(contains(ctl({"status", "--json"}).out, "\"counters\""));
  CHECK(contains(ctl({"ranks"}).out, "no client is attached"));
  CHECK(contains(ctl({"namespaces"}).out, "no namespace"));
  CHECK(contains(ctl({"clear"}).out, "0 pages evicted"));
  CHECK(contains(ctl({"evict", "3"}).out, "0 pages evicted"));
  CHECK(contains(ctl({"config"}).out, "\"segment_bytes\": \"1MiB\""));
  const auto unknown = ctl({"frobnicate"});
  CHECK(unknown.status.exited_with(1));
  CHECK(contains(unknown.err, "frobnicate"));
  CHECK(ctl({}).status.exited_with(2));
  CHECK(ctl({"evict", "many"}).status.exited_with(1));
  REQUIRE(daemon.stop() == 0);
  CHECK(ctl({"status", "--socket", daemon.socket_path()}).status.exited_with(3));
  CHECK(ctl({"status"}).status.exited_with(3));
}

TEST_CASE("hicache-ctl tells a user who may not read the region to name the socket") {
  if (::geteuid() != 0) {
    WARN("SKIPPED: only root can take another user's place");
    return;
  }
  const TestDaemon daemon;
  const std::string ctl = program("hicache-ctl");
  Child child = Child::run([&]() -> int {
    if (::setuid(54321) != 0) return 98;
    if (::access(ctl.c_str(), X_OK) != 0) return 97;
    const auto run = run_program({ctl, daemon.name(), "status"});
    return run.status.exited_with(3) && contains(run.err, "with --socket") ? 0 : 1;
  });
  const auto status = child.wait();
  REQUIRE(status.has_value());
  if (status->exited_with(97)) {
    WARN("SKIPPED: other users can't reach " << ctl);
    return;
  }
  CHECK(status->exited_with(0));
}

TEST_CASE("a stopped daemon makes hicache-ctl give up in time") {
  TestDaemon daemon;
  daemon.child().kill(SIGSTOP);
  const auto run = run_program({program("hicache-ctl"), daemon.name(), "status", "--timeout-ms", "200"});
  daemon.child().kill(SIGCONT);
  CHECK(run.status.exited_with(3));
  CHECK(contains(run.err, "timed_out"));
  CHECK(control(daemon.socket_path(), {"status"}).ok());
}

TEST_CASE("hicache-bench names what is wrong with a configuration or a command line") {
  TempDir dir;
  const auto bench = [&](const std::string& config) {
    write_text(dir.file("bench.json"), config);
    return run_program(
        {program("hicache-bench"), "replay", "--config", dir.file("bench.json"), "--pool-pages", "8"});
  };
  for (const char* wrong : {R"({"socket": {"path": 5}})", R"({"name": 5})", R"({"pool": 5})"}) {
    const auto run = bench(wrong);
    INFO(wrong << "\n" << run.err);
    CHECK(run.status.exited_with(1));
    CHECK(contains(run.err, "found 5, expected"));
  }
  CHECK(run_program({program("hicache-bench")}).status.exited_with(2));
}
