// Limits at the door: what hicache-ctl doctor says about a configuration is what hicached does with it, on
// this machine and under the same limits.
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/support/processes.hpp"

using namespace hicache;
using namespace hicache::test;
using nlohmann::json;

namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// A configuration in a directory of its own, and what a shell is told to run doctor and daemon with.
class Door {
 public:
  explicit Door(const std::string& overrides = "{}", std::string before = "exec ")
      : name_(unique_region_name()), before_(std::move(before)) {
    ::mkdir(socket_directory().c_str(), 0700);
    json config = {{"name", name_},
                   {"socket", {{"path", socket_directory() + "/hicached.sock"}}},
                   {"pool", {{"bytes", "16MiB"}, {"segment_bytes", "1MiB"}}}};
    config.merge_patch(json::parse(overrides));
    write_text(dir_.file("hicached.json"), config.dump(2));
  }
  ~Door() { remove_shm_leftovers(name_); }
  Door(const Door&) = delete;
  Door& operator=(const Door&) = delete;

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] std::string socket_directory() const { return dir_.file("sockets"); }

  [[nodiscard]] RunResult doctor() const {
    return run_program(command(program("hicache-ctl") + " doctor --json"));
  }

  struct Start {
    bool ready = false;
    int exit_code = -1;
    std::string log;
  };
  // Starts a daemon, and ends it when it has become ready.
  [[nodiscard]] Start start() const {
    Child child = Child::spawn(command(program("hicached") + " --foreground"));
    const auto line = child.read_line();
    Start result;
    result.ready = line && contains(*line, " ready ");
    if (result.ready) child.kill(SIGTERM);
    const auto status = child.wait();
    if (status && status->signal == 0) result.exit_code = status->code;
    result.log = child.error_text();
    return result;
  }

 private:
  [[nodiscard]] std::vector<std::string> command(const std::string& what) const {
    return {"/bin/sh", "-c", before_ + drop_ + what + " --config " + dir_.file("hicached.json")};
  }

  TempDir dir_;
  std::string name_;
  std::string before_;
  // A limit of locked memory is none for root's CAP_IPC_LOCK.
  std::string drop_ = ::geteuid() == 0 ? "setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock " : "";
};

// The doctor's verdict on each check. Fails unless a daemon, asked to start right after, does what it says:
// refused checks stop it, each with its remedy on standard error and nothing left behind; degraded ones are
// logged, and no others.
std::map<std::string, std::string> agreed(const Door& door) {
  const RunResult said = door.doctor();
  INFO(said.out << said.err);
  const json report = json::parse(said.out);
  const Door::Start start = door.start();
  INFO(start.log);
  const bool refused = report.at("refused").get<int>() > 0;
  CHECK(said.status.exited_with(refused ? 1 : 0));
  CHECK(start.ready == !refused);
  CHECK(start.exit_code == (refused ? 1 : 0));
  if (refused) CHECK(shm_leftovers(door.name()).empty());
  std::map<std::string, std::string> levels;
  for (const json& check : report.at("checks")) {
    const std::string name = check.at("check");
    const std::string level = check.at("level");
    INFO(name << ": " << level);
    levels[name] = level;
    // The daemon looks at the GPUs once it is up.
    if (name == "NVIDIA GPUs" && refused) continue;
    const bool warned = contains(start.log, "start check, " + name + ": ");
    CHECK(warned == (level == "degraded"));
    if (level == "refused") CHECK(contains(start.log, "\n" + name + ": "));
    if (level != "ok") CHECK(contains(start.log, check.at("remedy").get<std::string>()));
  }
  return levels;
}

}  // namespace

TEST_CASE("a machine that the doctor finds right starts a daemon that warns of nothing") {
  const auto levels = agreed(Door(R"({"cuda": {"mode": "off"}})", "ulimit -n 5000; exec "));
  CHECK(levels.size() == 10);
}

TEST_CASE("too few open files are refused, few are degraded") {
  CHECK(agreed(Door("{}", "ulimit -n 100; exec ")).at("open files") == "refused");
  CHECK(agreed(Door("{}", "ulimit -n 400; exec ")).at("open files") == "degraded");
}

TEST_CASE("too little lockable memory is degraded where the pool is to be pinned for GPUs") {
  const char* small = "ulimit -l 64; exec ";
  CHECK(agreed(Door(R"({"cuda": {"mode": "off"}})", small)).at("locked memory") == "ok");
  CHECK(agreed(Door(R"({"cuda": {"mode": "at_start"}})", small)).at("locked memory") == "degraded");
}

TEST_CASE("a soft limit of open files is no limit: the daemon raises itself to the hard one") {
  CHECK(agreed(Door("{}", "ulimit -S -n 100; exec ")).at("open files") != "refused");
}

TEST_CASE("huge pages that this machine does not give are refused with require and degraded with prefer") {
  const auto prefer = agreed(Door(R"({"pool": {"huge_pages": "prefer"}})")).at("huge pages");
  if (prefer == "ok") {
    WARN("/dev/shm has huge pages here: what is missing can't be shown");
    return;
  }
  CHECK(prefer == "degraded");
  CHECK(agreed(Door(R"({"pool": {"huge_pages": "require"}})")).at("huge pages") == "refused");
  CHECK(agreed(Door(R"({"pool": {"huge_pages": "off"}})")).at("huge pages") == "ok");
}

TEST_CASE("a /dev/shm mounted with huge=advise gives the pool huge pages, one that is too small is refused") {
  // Each program has a /dev/shm of its own.
  const auto mounted = [](const std::string& options) {
    return "exec unshare -m sh -c 'mount --make-rprivate / && mount -t tmpfs -o " + options +
           " tmpfs /dev/shm && exec \"$@\"' sh ";
  };
  const auto possible = run_program({"/bin/sh", "-c", mounted("huge=advise,size=64m") + "true"});
  if (!possible.status.exited_with(0)) {
    WARN("no file system of the test's own: " << possible.err);
    return;
  }
  const char* config = R"({"pool": {"bytes": "4MiB", "huge_pages": "prefer"}})";
  CHECK(agreed(Door(config, mounted("huge=advise,size=64m"))).at("huge pages") == "ok");
  CHECK(agreed(Door(config, mounted("huge=never,size=64m"))).at("huge pages") == "degraded");
  const Door small("{}", mounted("size=8m"));
  CHECK(agreed(small).at("/dev/shm") == "refused");
  CHECK(contains(small.start().log, "mount -o remount,size="));
}

TEST_CASE("a socket directory that others can write to is refused, with its path and the remedy") {
  const Door door;
  for (const ::mode_t mode : {0777, 0770, 0702}) {
    ::chmod(door.socket_directory().c_str(), mode);
    CHECK(agreed(door).at("socket directory") == "refused");
    CHECK(contains(door.start().log, "chmod go-w " + door.socket_directory()));
  }
  // As in /tmp: others may make files, but take nothing away.
  ::chmod(door.socket_directory().c_str(), 01777);
  CHECK(agreed(door).at("socket directory") == "ok");
  ::chmod(door.socket_directory().c_str(), 0755);
  CHECK(agreed(door).at("socket directory") == "ok");
}

TEST_CASE("a socket directory that is missing, no directory or another user's is refused") {
  const Door missing;
  ::rmdir(missing.socket_directory().c_str());
  CHECK(agreed(missing).at("socket directory") == "refused");
  const Door file;
  ::rmdir(file.socket_directory().c_str());
  write_text(file.socket_directory(), "");
  CHECK(agreed(file).at("socket directory") == "refused");
  if (::geteuid() == 0) {
    const Door foreign;
    REQUIRE(::chown(foreign.socket_directory().c_str(), 4711, 4711) == 0);
    CHECK(agreed(foreign).at("socket directory") == "refused");
    CHECK(contains(foreign.start().log, "belongs to uid 4711"));
  }
}

TEST_CASE("a pool that is larger than /dev/shm or the memory is refused, each with its own remedy") {
  const auto large = agreed(Door(R"({"pool": {"bytes": "60TiB", "segment_bytes": "1GiB"}})"));
  CHECK(large.at("/dev/shm") == "refused");
  CHECK(large.at("memory") == "refused");
  CHECK(agreed(Door(R"({"pool": {"memory_reserve": "60TiB"}})")).at("memory") == "refused");
}

TEST_CASE("a region that a killed daemon left needs no room of its own: doctor and daemon take it as it is") {
  TestDaemon daemon;
  daemon.kill9();
  // With this reserve there is no memory for a fresh one.
  daemon.write_config(R"({"pool": {"memory_reserve": "60TiB"}})");
  const auto said = run_program({program("hicache-ctl"), "doctor", "--config", daemon.config_path()});
  INFO(said.out);
  CHECK(said.status.exited_with(0));
  daemon.start();
  CHECK(contains(daemon.log(), "took the region over"));
  CHECK(daemon.stop() == 0);
}
