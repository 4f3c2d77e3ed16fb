// hicache-ctl doctor: every judgement over a made-up machine, and the measuring over a made-up root
// directory.
#include "tools/ctl/doctor.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "shm/types.hpp"
#include "tests/support/catch.hpp"

using namespace hicache;
using namespace hicache::ctl;

namespace {

namespace fs = std::filesystem;

daemon::Config small_config() {
  daemon::Config config;
  config.name = "doctor-test";
  config.pool.bytes = 64 * kMiB;
  return config;
}

// A machine on which everything is right.
Machine good_machine() {
  Machine m;
  m.uid = 0;
  m.shm_mounted = true;
  m.shm_bytes = m.shm_free = 8 * kGiB;
  m.shm_huge = "within_size";
  m.shmem_enabled = "never";
  m.memory_bytes = 16 * kGiB;
  m.memory_available = 12 * kGiB;
  m.memlock = kUnlimited;
  m.descriptors = 1 << 20;
  m.socket_path = "/run/hicache/doctor-test.sock";
  m.socket_directory = {"/run/hicache", true, true, false, 0, true};
  m.gpus.emplace();
  return m;
}

Check find(const std::vector<Check>& checks, const std::string& name) {
  const auto at = std::find_if(checks.begin(), checks.end(), [&](const Check& c) { return c.name == name; });
  REQUIRE(at != checks.end());
  return *at;
}

// The judgement `name` over the good machine with one thing changed.
template <class Change>
Check judged(const std::string& name, Change change) {
  Machine m = good_machine();
  change(m);
  const auto checks = examine(small_config(), m);
  for (const Check& c : checks) {
    INFO(c.name << ": " << c.found);
    CHECK((c.level == Level::ok) == c.remedy.empty());
    if (c.name != name) CHECK(c.level == Level::ok);
  }
  return find(checks, name);
}

bool mentions(const Check& c, const std::string& text) {
  return (c.found + "\n" + c.remedy).find(text) != std::string::npos;
}

class FakeRoot {
 public:
  FakeRoot() : path_(fs::temp_directory_path() / ("hicache-doctor-" + std::to_string(::getpid()))) {
    fs::remove_all(path_);
    fs::create_directories(path_ / "dev/shm");
  }
  ~FakeRoot() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  void put(const std::string& file, const std::string& text) const {
    fs::create_directories((path_ / file).parent_path());
    std::ofstream(path_ / file) << text;
  }
  void make(const std::string& directory) const { fs::create_directories(path_ / directory); }
  [[nodiscard]] fs::path at(const std::string& file) const { return path_ / file; }
  [[nodiscard]] Machine measured(std::optional<std::string> smi = std::nullopt, int io_uring = 0,
                                 const daemon::Config& config = small_config()) const {
    return measure(config, Probes{path_.string(), [smi](const std::string&) { return smi; },
                                  [io_uring] { return io_uring; }});
  }

 private:
  fs::path path_;
};

}  // namespace

TEST_CASE("The doctor finds nothing wrong with a good machine") {
  const auto checks = examine(small_config(), good_machine());
  for (const Check& c : checks) {
    INFO(c.name << ": " << c.found);
    CHECK(c.level == Level::ok);
  }
  CHECK(checks.size() == 10);
  CHECK(doctor_exit_code(checks) == 0);
}

TEST_CASE("A /dev/shm that is too small fails with the size to give it") {
  const Check c = judged("/dev/shm", [](Machine& m) {
    m.shm_bytes = 64 * kMiB;
    m.shm_free = 60 * kMiB;
  });
  CHECK(c.level == Level::fail);
  CHECK(mentions(c, "mount -o remount,size="));
  CHECK(judged("/dev/shm", [](Machine& m) { m.shm_mounted = false; }).level == Level::fail);
}

TEST_CASE("Too little memory fails, too little of it free is a warning") {
  CHECK(judged("memory", [](Machine& m) { m.memory_bytes = m.memory_available = 32 * kMiB; }).level ==
        Level::fail);
  CHECK(judged("memory", [](Machine& m) { m.memory_available = 32 * kMiB; }).level == Level::warn);
}

TEST_CASE("A cgroup limit below the pool fails and names the file that sets it") {
  const Check c = judged("cgroup memory limit", [](Machine& m) {
    m.cgroup_limit = 64 * kMiB;
    m.cgroup_path = "/sys/fs/cgroup/a/memory.max";
  });
  CHECK(c.level == Level::fail);
  CHECK(mentions(c, "/sys/fs/cgroup/a/memory.max"));
  CHECK(judged("cgroup memory limit", [](Machine& m) { m.cgroup_limit = 200 * kMiB; }).level == Level::warn);
  CHECK(judged("cgroup memory limit", [](Machine& m) { m.cgroup_limit = 2 * kGiB; }).level == Level::ok);
}

TEST_CASE("A memlock limit below the pool is a warning unless the capability lifts it") {
  CHECK(judged("locked memory", [](Machine& m) { m.memlock = 8 * kMiB; }).level == Level::warn);
  CHECK(judged("locked memory", [](Machine& m) {
          m.memlock = 8 * kMiB;
          m.may_lock_any = true;
        }).level == Level::ok);
}

TEST_CASE("A limit of open files below what the clients need fails") {
  CHECK(judged("open files", [](Machine& m) { m.descriptors = 128; }).level == Level::fail);
  CHECK(judged("open files", [](Machine& m) { m.descriptors = 1024; }).level == Level::warn);
}

TEST_CASE("Missing huge pages are a warning with the mount option that gives them") {
  const Check c = judged("huge pages", [](Machine& m) { m.shm_huge.clear(); });
  CHECK(c.level == Level::warn);
  CHECK(mentions(c, "huge=within_size"));
  CHECK(judged("huge pages", [](Machine& m) { m.shmem_enabled = "deny"; }).level == Level::warn);
  CHECK(judged("huge pages", [](Machine& m) {
          m.shm_huge.clear();
          m.shmem_enabled = "force";
        }).level == Level::ok);
}

TEST_CASE("A socket directory that others may write, that is no directory or not ours fails") {
  const auto with = [](auto change) {
    return judged("socket directory", [&](Machine& m) { change(m.socket_directory); }).level;
  };
  CHECK(with([](SocketDirectory& d) { d.others_write = true; }) == Level::fail);
  CHECK(with([](SocketDirectory& d) { d.is_directory = false; }) == Level::fail);
  CHECK(with([](SocketDirectory& d) { d.usable = false; }) == Level::fail);
  CHECK(with([](SocketDirectory& d) { d.owner = 4711; }) == Level::fail);
  CHECK(with([](SocketDirectory& d) { d.exists = d.usable = false; }) == Level::fail);
  CHECK(with([](SocketDirectory& d) { d.exists = false; }) == Level::ok);
  CHECK(judged("socket directory", [](Machine& m) { m.socket_path = "/" + std::string(200, 'x'); }).level ==
        Level::fail);
}

TEST_CASE("RemoveIPC is a warning only for a user it would touch") {
  const auto with = [](auto change) {
    return judged("RemoveIPC",
                  [&](Machine& m) {
                    m.logind = true;
                    m.uid = 1000;
                    m.socket_directory.owner = 1000;
                    change(m);
                  })
        .level;
  };
  CHECK(with([](Machine&) {}) == Level::warn);
  CHECK(with([](Machine& m) { m.remove_ipc = false; }) == Level::ok);
  CHECK(with([](Machine& m) { m.lingers = true; }) == Level::ok);
  CHECK(with([](Machine& m) { m.logind = false; }) == Level::ok);
  CHECK(with([](Machine& m) { m.uid = m.socket_directory.owner = 110; }) == Level::ok);
}

TEST_CASE("A GPU in exclusive-process mode fails, one in MIG mode is a warning") {
  const auto with = [](std::optional<std::vector<Gpu>> gpus) {
    return judged("NVIDIA GPUs", [&](Machine& m) {
      m.nvidia_driver = true;
      m.gpus = std::move(gpus);
    });
  };
  CHECK(with({{{"A", "Default", false}, {"B", "Default", false}}}).level == Level::ok);
  const Check exclusive = with({{{"A", "Default", true}, {"B", "Exclusive_Process", false}}});
  CHECK(exclusive.level == Level::fail);
  CHECK(mentions(exclusive, "nvidia-smi -i 1 -c DEFAULT"));
  CHECK(with({{{"A", "Default", true}}}).level == Level::warn);
  CHECK(with(std::vector<Gpu>{}).level == Level::warn);
  CHECK(with(std::nullopt).level == Level::warn);
}

TEST_CASE("A refused io_uring is a warning that names the error") {
  const Check c = judged("io_uring", [](Machine& m) { m.io_uring_errno = EPERM; });
  CHECK(c.level == Level::warn);
  CHECK(mentions(c, "not permitted"));
}

TEST_CASE("The doctor's report has a line for each check, JSON too, and fails when one does") {
  Machine m = good_machine();
  m.shm_free = 0;
  const auto checks = examine(small_config(), m);
  CHECK(doctor_exit_code(checks) == 1);
  const std::string text = doctor_text(checks);
  CHECK(text.find("fail  /dev/shm") == 0);
  CHECK(text.find("9 ok, 0 warnings, 1 failed\n") != std::string::npos);
  const auto doc = nlohmann::json::parse(doctor_json(checks));
  CHECK(doc["checks"].size() == checks.size());
  CHECK(doc["checks"][0]["level"] == "fail");
  CHECK(doc["failed"] == 1);
}

TEST_CASE("The doctor reads the tightest cgroup limit on the way to the root") {
  const FakeRoot root;
  root.put("proc/self/cgroup", "0::/a/b\n");
  root.put("sys/fs/cgroup/a/b/memory.max", "max\n");
  root.put("sys/fs/cgroup/a/memory.max", "1048576\n");
  CHECK(root.measured().cgroup_limit == kMiB);
  CHECK(root.measured().cgroup_path == root.at("sys/fs/cgroup/a/memory.max").string());
  root.put("proc/self/cgroup", "5:cpu,memory:/c\n");
  root.put("sys/fs/cgroup/memory/c/memory.limit_in_bytes", "9223372036854771712\n");
  CHECK(root.measured().cgroup_limit == kUnlimited);
  root.put("sys/fs/cgroup/memory/memory.limit_in_bytes", "2097152\n");
  CHECK(root.measured().cgroup_limit == 2 * kMiB);
  root.put("proc/self/cgroup", "garbage\n::\n0::\n");
  CHECK(root.measured().cgroup_limit == kUnlimited);
}

TEST_CASE("The doctor reads memory, mounts, huge pages and capabilities") {
  const FakeRoot root;
  root.put("proc/meminfo", "MemTotal:  2048 kB\nMemFree: 1 kB\nMemAvailable: 1024 kB\n");
  root.put("proc/mounts",
           "tmpfs /tmp tmpfs rw,huge=never 0 0\ntmpfs /dev/shm tmpfs rw,nosuid,huge=always 0 0\n");
  root.put("sys/kernel/mm/transparent_hugepage/shmem_enabled",
           "always within_size [advise] never deny force\n");
  root.put("proc/self/status", "Name:\tx\nCapEff:\t0000000000004000\n");
  const Machine m = root.measured(std::nullopt, EPERM);
  CHECK(m.memory_bytes == 2 * kMiB);
  CHECK(m.memory_available == kMiB);
  CHECK(m.shm_mounted);
  CHECK(m.shm_huge == "always");
  CHECK(m.shmem_enabled == "advise");
  CHECK(m.may_lock_any);
  CHECK(m.io_uring_errno == EPERM);
  root.put("proc/self/status", "CapEff:\t00000000a80425fb\n");
  CHECK_FALSE(root.measured().may_lock_any);
}

TEST_CASE("Objects that a new daemon replaces count as free") {
  const FakeRoot root;
  const std::uint64_t before = root.measured().shm_free;
  root.put("dev/shm/hicache.doctor-test.pool0", std::string(16 * kMiB, 'x'));
  ::sync();
  const auto after = root.measured().shm_free;
  // Others use the file system too: the object must not be missing as a whole.
  CHECK(after + 8 * kMiB > before);
}

TEST_CASE("The doctor reads logind's drop-ins after its main file") {
  const FakeRoot root;
  CHECK_FALSE(root.measured().logind);
  root.make("run/systemd/seats");
  CHECK(root.measured().logind);
  CHECK(root.measured().remove_ipc);
  root.put("etc/systemd/logind.conf", "[Login]\n#RemoveIPC=yes\nRemoveIPC=yes\n");
  root.put("usr/lib/systemd/logind.conf.d/50-a.conf", "[Login]\n RemoveIPC=no\n");
  CHECK_FALSE(root.measured().remove_ipc);
  root.put("etc/systemd/logind.conf.d/60-b.conf", "[Login]\nRemoveIPC=yes\n");
  CHECK(root.measured().remove_ipc);
}

TEST_CASE("The doctor asks nvidia-smi only where a driver is loaded") {
  const FakeRoot root;
  const std::string answer = "NVIDIA H200, Default, Disabled\nNVIDIA H200, Exclusive_Process, Enabled\n";
  CHECK(root.measured(answer).gpus->empty());
  root.put("proc/driver/nvidia/version", "570\n");
  const auto gpus = root.measured(answer).gpus;
  REQUIRE(gpus->size() == 2);
  CHECK((*gpus)[0].compute_mode == "Default");
  CHECK_FALSE((*gpus)[0].mig);
  CHECK((*gpus)[1].compute_mode == "Exclusive_Process");
  CHECK((*gpus)[1].mig);
  CHECK_FALSE(root.measured(std::nullopt).gpus.has_value());
}

TEST_CASE("The doctor looks at the directory of the configured socket") {
  const FakeRoot root;
  daemon::Config config = small_config();
  config.socket.path = "/sockets/here.sock";
  CHECK_FALSE(root.measured(std::nullopt, 0, config).socket_directory.exists);
  root.make("sockets");
  fs::permissions(root.at("sockets"), fs::perms::owner_all);
  CHECK(root.measured(std::nullopt, 0, config).socket_directory.usable);
  CHECK_FALSE(root.measured(std::nullopt, 0, config).socket_directory.others_write);
  fs::permissions(root.at("sockets"), fs::perms::all);
  CHECK(root.measured(std::nullopt, 0, config).socket_directory.others_write);
}

TEST_CASE("The doctor refuses a wrong command line and a configuration that it can't read") {
  const auto run = [](std::vector<const char*> arguments) {
    arguments.insert(arguments.begin(), "doctor");
    return run_doctor(static_cast<int>(arguments.size()), arguments.data());
  };
  CHECK(run({"--nothing"}) == 2);
  CHECK(run({"--config", "/nonexistent/hicache.json"}) == 2);
  const FakeRoot root;
  root.put("wrong.json", R"({"pool":{"bytes":"no size"}})");
  CHECK(run({"--config", root.at("wrong.json").c_str()}) == 2);
}
