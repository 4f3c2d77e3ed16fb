// The start checks: every judgement over a made-up machine, and the measuring over a made-up root directory.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "shm/machine/checks.hpp"
#include "shm/machine/machine.hpp"
#include "shm/machine/needs.hpp"
#include "shm/types.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/processes.hpp"

using namespace hicache;
using namespace hicache::machine;
using namespace std::string_view_literals;

namespace {

namespace fs = std::filesystem;

Needs small_needs() {
  Needs needs;
  needs.name = "machine-test";
  needs.socket_path = "/run/hicache/machine-test.sock";
  needs.own_directory = true;
  needs.pool_bytes = 64 * kMiB;
  needs.control_bytes = 8 * kMiB;
  needs.memory_reserve = kGiB;
  needs.clients = 64;
  needs.huge_pages = HugePageNeed::preferred;
  needs.gpus = GpuNeed::on_demand;
  needs.io_uring = IoUringNeed::preferred;
  return needs;
}

// A machine on which everything is right.
Machine good_machine() {
  Machine m;
  m.shm_mounted = true;
  m.shm_bytes = m.shm_free = 8 * kGiB;
  m.shm_huge = "advise";
  m.shmem_enabled = "never";
  m.memory_bytes = 16 * kGiB;
  m.memory_available = 12 * kGiB;
  m.descriptors = 1 << 20;
  m.socket_directory = {"/run/hicache", true, true, false, 0, true, ""};
  return m;
}

std::vector<Check> all_checks(const Needs& needs, const Machine& m) {
  auto checks = examine(needs, m);
  checks.push_back(check_gpus(needs, m));
  return checks;
}

// The judgement `name` over the good machine and small needs with something changed.
template <class Change>
Check judged(const std::string& name, Change change) {
  Needs needs = small_needs();
  Machine m = good_machine();
  if constexpr (std::is_invocable_v<Change, Machine&, Needs&>) {
    change(m, needs);
  } else {
    change(m);
  }
  const auto checks = all_checks(needs, m);
  for (const Check& c : checks) {
    INFO(c.name << ": " << c.found);
    CHECK((c.level == Level::ok) == c.remedy.empty());
    if (c.name != name) CHECK(c.level == Level::ok);
  }
  const auto at = std::find_if(checks.begin(), checks.end(), [&](const Check& c) { return c.name == name; });
  REQUIRE(at != checks.end());
  return *at;
}

bool mentions(const Check& c, const std::string& text) {
  return sentence(c).find(text) != std::string::npos;
}

class FakeRoot {
 public:
  FakeRoot() { fs::create_directories(at("dev/shm")); }
  void put(const std::string& file, const std::string& text) const {
    fs::create_directories(at(file).parent_path());
    std::ofstream(at(file)) << text;
  }
  void make(const std::string& directory) const { fs::create_directories(at(directory)); }
  [[nodiscard]] fs::path at(const std::string& file) const { return fs::path(dir_.path()) / file; }
  [[nodiscard]] Machine measured(std::optional<std::string> smi = std::nullopt, int io_uring = 0,
                                 const Needs& needs = small_needs()) const {
    const Probes probes{dir_.path(), [smi](const std::string&) { return smi; },
                        [io_uring] { return io_uring; }};
    Machine m = measure(needs, probes);
    measure_gpus(probes, m);
    return m;
  }

 private:
  test::TempDir dir_;
};

}  // namespace

TEST_CASE("nothing is wrong with a good machine") {
  const auto checks = all_checks(small_needs(), good_machine());
  for (const Check& c : checks) {
    INFO(c.name << ": " << c.found);
    CHECK(c.level == Level::ok);
  }
  CHECK(checks.size() == 10);
}

TEST_CASE("a /dev/shm that is too small is refused with the size to give it") {
  const Check c = judged("/dev/shm", [](Machine& m) {
    m.shm_bytes = 64 * kMiB;
    m.shm_free = 60 * kMiB;
  });
  CHECK(c.level == Level::refused);
  // 4 MiB are taken, 72 MiB are needed.
  CHECK(mentions(c, "mount -o remount,size=" + std::to_string(76 * kMiB)));
  CHECK(judged("/dev/shm", [](Machine& m) { m.shm_mounted = false; }).level == Level::refused);
  // What an earlier daemon of the name holds is taken over or replaced.
  CHECK(judged("/dev/shm", [](Machine& m) {
          m.shm_free = 0;
          m.shm_held = 72 * kMiB;
        }).level == Level::ok);
}

TEST_CASE("memory that the machine or its reserve does not have is refused, unless it is reserved already") {
  CHECK(judged("memory", [](Machine& m) { m.memory_bytes = 32 * kMiB; }).level == Level::refused);
  const Check c = judged("memory", [](Machine& m) { m.memory_available = kGiB + 71 * kMiB; });
  CHECK(c.level == Level::refused);
  CHECK(mentions(c, "pool.memory_reserve keeps 1 GiB"));
  CHECK(judged("memory", [](Machine& m) { m.memory_available = kGiB + 72 * kMiB; }).level == Level::ok);
  CHECK(judged("memory", [](Machine& m, Needs& n) {
          n.memory_reserve = ~0ull;
          m.memory_available = 15 * kGiB;
        }).level == Level::refused);
  CHECK(judged("memory", [](Machine& m) {
          m.memory_available = 0;
          m.shm_held = 72 * kMiB;
        }).level == Level::ok);
  CHECK(judged("memory", [](Machine& m) { m.memory_available = kUnlimited; }).level == Level::degraded);
}

TEST_CASE("a cgroup limit below the pool is refused and names the file that sets it") {
  const Check c = judged("cgroup memory limit", [](Machine& m) {
    m.cgroup_limit = 64 * kMiB;
    m.cgroup_path = "/sys/fs/cgroup/a/memory.max";
  });
  CHECK(c.level == Level::refused);
  CHECK(mentions(c, "64 MiB (/sys/fs/cgroup/a/memory.max)"));
  CHECK(mentions(c, "MemoryMax="));
  CHECK(judged("cgroup memory limit", [](Machine& m) { m.cgroup_limit = 200 * kMiB; }).level ==
        Level::degraded);
  CHECK(judged("cgroup memory limit", [](Machine& m) { m.cgroup_limit = 2 * kGiB; }).level == Level::ok);
}

TEST_CASE("a memlock limit below the pool is degraded where GPUs are used and no capability lifts it") {
  const auto with = [](bool driver, GpuNeed gpus, bool capability) {
    return judged("locked memory",
                  [&](Machine& m, Needs& n) {
                    m.memlock = 8 * kMiB;
                    m.may_lock_any = capability;
                    if (driver) {
                      m.nvidia_driver = true;
                      m.gpus = {{"A", "Default", false}};
                    }
                    n.gpus = gpus;
                  })
        .level;
  };
  CHECK(with(true, GpuNeed::on_demand, false) == Level::degraded);
  CHECK(with(true, GpuNeed::at_start, false) == Level::degraded);
  CHECK(with(true, GpuNeed::on_demand, true) == Level::ok);
  CHECK(with(true, GpuNeed::none, false) == Level::ok);
  CHECK(with(false, GpuNeed::on_demand, false) == Level::ok);
}

TEST_CASE("a limit of open files below what the clients need is refused, a tight one is degraded") {
  const Check c = judged("open files", [](Machine& m) { m.descriptors = 319; });
  CHECK(c.level == Level::refused);
  CHECK(mentions(c, "limits.clients 64 needs 320 at least"));
  CHECK(judged("open files", [](Machine& m) { m.descriptors = 320; }).level == Level::degraded);
  CHECK(judged("open files", [](Machine& m) { m.descriptors = 4416; }).level == Level::ok);
}

TEST_CASE("missing huge pages are refused, degraded or nothing, as pool.huge_pages wants them") {
  const auto without = [](HugePageNeed need) {
    return judged("huge pages", [&](Machine& m, Needs& n) {
      m.shm_huge.clear();
      n.huge_pages = need;
    });
  };
  CHECK(without(HugePageNeed::none).level == Level::ok);
  CHECK(without(HugePageNeed::preferred).level == Level::degraded);
  CHECK(without(HugePageNeed::required).level == Level::refused);
  CHECK(mentions(without(HugePageNeed::preferred), "huge=advise"));
  CHECK(mentions(without(HugePageNeed::required), "set pool.huge_pages to \"prefer\""));
  CHECK(judged("huge pages", [](Machine& m) { m.shmem_enabled = "deny"; }).level == Level::degraded);
  for (const char* mounted : {"always", "within_size", "advise"})
    CHECK(judged("huge pages", [&](Machine& m) { m.shm_huge = mounted; }).level == Level::ok);
  CHECK(judged("huge pages", [](Machine& m) {
          m.shm_huge.clear();
          m.shmem_enabled = "force";
        }).level == Level::ok);
}

TEST_CASE("a socket directory that others may write, that is no directory or not ours is refused") {
  const auto with = [](auto change) {
    return judged("socket directory", [&](Machine& m) { change(m.socket_directory); });
  };
  const Check open = with([](SocketDirectory& d) { d.others_write = true; });
  CHECK(open.level == Level::refused);
  CHECK(mentions(open, "chmod go-w /run/hicache"));
  CHECK(with([](SocketDirectory& d) { d.is_directory = false; }).level == Level::refused);
  CHECK(with([](SocketDirectory& d) { d.usable = false; }).level == Level::refused);
  CHECK(mentions(with([](SocketDirectory& d) { d.owner = 4711; }), "belongs to uid 4711"));
  CHECK(with([](SocketDirectory& d) { d.exists = d.usable = false; }).level == Level::refused);
  CHECK(with([](SocketDirectory& d) { d.exists = false; }).level == Level::ok);
  for (const std::string& path : {std::string(), "/" + std::string(107, 'x')}) {
    CHECK(judged("socket directory", [&](Machine&, Needs& n) { n.socket_path = path; }).level ==
          Level::refused);
  }
}

TEST_CASE("root's directory is good enough for a configured socket, but not for the default one of a user") {
  const auto with = [](bool own, std::uint32_t owner) {
    return judged("socket directory",
                  [&](Machine& m, Needs& n) {
                    m.uid = 1000;
                    m.socket_directory.owner = owner;
                    n.own_directory = own;
                  })
        .level;
  };
  CHECK(with(false, 0) == Level::ok);
  CHECK(with(true, 0) == Level::refused);
  CHECK(with(true, 1000) == Level::ok);
  CHECK(with(false, 1001) == Level::refused);
}

TEST_CASE("RemoveIPC is degraded only for a user it would touch") {
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
  CHECK(with([](Machine&) {}) == Level::degraded);
  CHECK(with([](Machine& m) { m.remove_ipc = false; }) == Level::ok);
  CHECK(with([](Machine& m) { m.lingers = true; }) == Level::ok);
  CHECK(with([](Machine& m) { m.logind = false; }) == Level::ok);
  CHECK(with([](Machine& m) { m.uid = m.socket_directory.owner = 110; }) == Level::ok);
}

TEST_CASE("GPUs in exclusive-process, prohibited or MIG mode are degraded, with the command that ends it") {
  const auto with = [](std::optional<std::vector<Gpu>> gpus, GpuNeed need = GpuNeed::on_demand) {
    return judged("NVIDIA GPUs", [&](Machine& m, Needs& n) {
      m.nvidia_driver = true;
      m.gpus = std::move(gpus);
      n.gpus = need;
    });
  };
  CHECK(with({{{"A", "Default", false}, {"B", "Default", false}}}).level == Level::ok);
  const Check exclusive = with({{{"A", "Default", true}, {"B", "Exclusive_Process", false}}});
  CHECK(exclusive.level == Level::degraded);
  CHECK(mentions(exclusive, "nvidia-smi -i 1 -c DEFAULT"));
  CHECK(with({{{"A", "Prohibited", false}}}).level == Level::degraded);
  CHECK(mentions(with({{{"A", "Default", true}}}), "nvidia-smi -i 0 -mig 0"));
  CHECK(with(std::vector<Gpu>{}).level == Level::degraded);
  CHECK(with(std::nullopt).level == Level::degraded);
  CHECK(with({{{"B", "Exclusive_Process", false}}}, GpuNeed::none).level == Level::ok);
  CHECK(judged("NVIDIA GPUs", [](Machine&, Needs& n) { n.gpus = GpuNeed::at_start; }).level ==
        Level::degraded);
}

TEST_CASE("a refused io_uring is refused, degraded or nothing, as storage.file.engine wants it") {
  const auto with = [](IoUringNeed need) {
    return judged("io_uring", [&](Machine& m, Needs& n) {
      m.io_uring_errno = EPERM;
      n.io_uring = need;
    });
  };
  CHECK(with(IoUringNeed::none).level == Level::ok);
  CHECK(with(IoUringNeed::preferred).level == Level::degraded);
  CHECK(with(IoUringNeed::required).level == Level::refused);
  CHECK(mentions(with(IoUringNeed::preferred), "not permitted"));
}

TEST_CASE(
    "the needs of a daemon survive their text form, and a text that is not one is refused by its line") {
  const Needs before = small_needs();
  const std::string text = needs_to_text(before);
  const auto after = parse_needs(text);
  REQUIRE(after);
  CHECK(needs_to_text(*after) == text);
  CHECK(after->pool_bytes == before.pool_bytes);
  CHECK(after->io_uring == IoUringNeed::preferred);
  CHECK(after->own_directory);
  const auto refusal = [](const std::string& wrong) {
    const auto parsed = parse_needs(wrong);
    return parsed ? std::string() : parsed.error().message;
  };
  CHECK(refusal(text + "more 1\n").find("'more 1'") != std::string::npos);
  CHECK(refusal(text + "clients 64\n").find("'clients 64'") != std::string::npos);
  CHECK(refusal(text.substr(text.find('\n') + 1)).find("name is missing") != std::string::npos);
  for (const char* wrong : {"clients -1", "clients 4294967296", "clients x", "clients", "clients 6 4"})
    CHECK(refusal(wrong).find(wrong) != std::string::npos);
  CHECK_FALSE(refusal("gpus all").empty());
}

TEST_CASE("measuring reads the tightest cgroup limit on the way to the root") {
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

TEST_CASE("measuring reads memory, mounts, huge pages and capabilities") {
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

TEST_CASE(
    "objects of the daemon's own name are told from what is free, and other files there are not its own") {
  const FakeRoot root;
  CHECK(root.measured().shm_held == 0);
  root.put("dev/shm/hicache.machine-test.pool0", std::string(kMiB, 'x'));
  root.put("dev/shm/hicache.other.pool0", std::string(kMiB, 'x'));
  ::sync();
  const std::uint64_t held = root.measured().shm_held;
  CHECK(held >= kMiB);
  CHECK(held < 2 * kMiB);
}

TEST_CASE("garbage in the system's files raises no alarm and ends nothing") {
  const FakeRoot root;
  const std::string noise(
      "\0\xff[\n]] Max open files\nMax open files  many  99999999999999999999  files\n::\n0::\n"sv);
  for (const char* file : {"proc/meminfo", "proc/mounts", "proc/self/limits", "proc/self/status",
                           "proc/self/cgroup", "sys/fs/cgroup/memory.max", "etc/systemd/logind.conf",
                           "sys/kernel/mm/transparent_hugepage/shmem_enabled"})
    root.put(file, noise);
  root.put("proc/meminfo", "MemTotal: 99999999999999999999 kB\nMemTotal: -5 kB\nMemAvailable: lots\n");
  const Machine m = root.measured();
  CHECK(m.memory_bytes == kUnlimited);
  CHECK(m.memory_available == kUnlimited);
  CHECK(m.descriptors == kUnlimited);
  CHECK(m.memlock == kUnlimited);
  CHECK(m.cgroup_limit == kUnlimited);
  CHECK_FALSE(m.may_lock_any);
  CHECK(m.shm_huge.empty());
  for (const Check& c : examine(small_needs(), m)) {
    INFO(sentence(c));
    // The made-up root has no place for the socket, and /dev/shm is that of the machine.
    if (c.name != "socket directory" && c.name != "/dev/shm") CHECK(c.level != Level::refused);
  }
}

TEST_CASE("measuring reads the hard limits, and finds a tmpfs at /dev when /dev/shm is none of its own") {
  const FakeRoot root;
  root.put("proc/self/limits",
           "Limit                     Soft Limit           Hard Limit           Units     \n"
           "Max open files            1024                 4096                 files     \n"
           "Max locked memory         65536                unlimited            bytes     \n");
  root.put("proc/mounts", "tmpfs /dev tmpfs rw,huge=within_size 0 0\n");
  const Machine m = root.measured();
  CHECK(m.descriptors == 4096);
  CHECK(m.memlock == kUnlimited);
  CHECK(m.shm_huge == "within_size");
  root.put("proc/mounts", "tmpfs /dev/shm tmpfs rw 0 0\ntmpfs /dev tmpfs rw,huge=within_size 0 0\n");
  CHECK(root.measured().shm_huge.empty());
}

TEST_CASE("measuring reads logind's drop-ins after its main file") {
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

TEST_CASE("nvidia-smi is asked only where a driver is loaded") {
  const FakeRoot root;
  const std::string answer = "NVIDIA H200, Default, Disabled\nNVIDIA H200, Exclusive_Process, Enabled\n";
  CHECK_FALSE(root.measured(answer).gpus.has_value());
  root.put("proc/driver/nvidia/version", "570\n");
  const auto gpus = root.measured(answer).gpus;
  REQUIRE(gpus->size() == 2);
  CHECK((*gpus)[0].compute_mode == "Default");
  CHECK_FALSE((*gpus)[0].mig);
  CHECK((*gpus)[1].compute_mode == "Exclusive_Process");
  CHECK((*gpus)[1].mig);
  CHECK_FALSE(root.measured(std::nullopt).gpus.has_value());
}

TEST_CASE("measuring looks at the directory of the configured socket") {
  const FakeRoot root;
  Needs needs = small_needs();
  needs.socket_path = "/sockets/here.sock";
  needs.own_directory = false;
  CHECK_FALSE(root.measured(std::nullopt, 0, needs).socket_directory.exists);
  root.make("sockets");
  fs::permissions(root.at("sockets"), fs::perms::owner_all);
  CHECK(root.measured(std::nullopt, 0, needs).socket_directory.usable);
  CHECK_FALSE(root.measured(std::nullopt, 0, needs).socket_directory.others_write);
  fs::permissions(root.at("sockets"), fs::perms::all);
  CHECK(root.measured(std::nullopt, 0, needs).socket_directory.others_write);
  // A link is followed where the path was configured, and never where the daemon makes its directory.
  fs::permissions(root.at("sockets"), fs::perms::owner_all);
  fs::create_directory_symlink(root.at("sockets"), root.at("link"));
  needs.socket_path = "/link/here.sock";
  CHECK(root.measured(std::nullopt, 0, needs).socket_directory.usable);
  needs.own_directory = true;
  CHECK_FALSE(root.measured(std::nullopt, 0, needs).socket_directory.is_directory);
}
