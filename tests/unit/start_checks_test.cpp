// What the daemon does about its start checks, over a made-up root directory.
#include "daemon/start_checks.hpp"

#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include <sstream>

#include "daemon/needs.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/processes.hpp"

namespace hicache::daemon {
namespace {

// A machine of which only the files that a test puts there speak.
class MadeUpMachine {
 public:
  MadeUpMachine() {
    make("/sockets/here", "");
    ::mkdir((dir_.path() + "/dev").c_str(), 0700);
    ::mkdir((dir_.path() + "/dev/shm").c_str(), 0700);
    make("/proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 67108864 kB\n");
  }
  void make(const std::string& path, const std::string& text) {
    for (std::size_t at = path.find('/', 1); at != std::string::npos; at = path.find('/', at + 1))
      ::mkdir((dir_.path() + path.substr(0, at)).c_str(), 0700);
    test::write_text(dir_.path() + path, text);
  }
  [[nodiscard]] machine::Probes probes() const {
    return {dir_.path(), [](const std::string&) { return std::nullopt; }, [] { return 0; }};
  }

 private:
  test::TempDir dir_;
};

Config config_with_pool(std::uint64_t bytes) {
  Config config;
  config.pool.bytes = bytes;
  config.socket.path = "/sockets/a.sock";
  return config;
}

// What is logged while it lives.
class LogCapture {
 public:
  LogCapture() : before_(spdlog::default_logger()) {
    spdlog::set_default_logger(
        std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_st>(text_)));
  }
  ~LogCapture() { spdlog::set_default_logger(before_); }
  [[nodiscard]] std::string text() const { return text_.str(); }

 private:
  std::ostringstream text_;
  std::shared_ptr<spdlog::logger> before_;
};

}  // namespace

TEST_CASE("a cgroup limit below pool and control region is refused with both sizes and the remedy") {
  MadeUpMachine machine;
  machine.make("/proc/self/cgroup", "0::/docker/abc\n");
  machine.make("/sys/fs/cgroup/docker/abc/memory.max", "536870912\n");
  const Outcome refused = check_start(needs_of(config_with_pool(512 * kMiB)), machine.probes());
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().message.find("512 MiB (" + machine.probes().root) != std::string::npos);
  CHECK(refused.error().message.find("MemoryMax=") != std::string::npos);
  const LogCapture log;
  CHECK(check_start(needs_of(config_with_pool(128 * kMiB)), machine.probes()).ok());
  CHECK(log.text().empty());
}

TEST_CASE("every refused check is named, and what is only degraded is logged with its remedy") {
  MadeUpMachine machine;
  machine.make("/proc/self/limits", "Max open files            100      100    files\n");
  machine.make("/proc/self/cgroup", "0::/a\n");
  machine.make("/sys/fs/cgroup/a/memory.max", "1048576\n");
  const LogCapture log;
  Config config = config_with_pool(64 * kMiB);
  config.pool.huge_pages = HugePages::prefer;
  const Outcome refused = check_start(needs_of(config), machine.probes());
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().message.find("open files: hard limit 100") != std::string::npos);
  CHECK(refused.error().message.find("\ncgroup memory limit") == std::string::npos);
  CHECK(refused.error().message.find("cgroup memory limit: 1 MiB") == 0);
  CHECK(log.text().find("start check, huge pages: ") != std::string::npos);
  CHECK(log.text().find("remount,huge=advise") != std::string::npos);
}

TEST_CASE("a configuration's needs are its region's sizes, its socket, and what storage and GPUs ask for") {
  Config config = config_with_pool(64 * kMiB);
  config.pool.segment_bytes = kMiB;
  config.pool.huge_pages = HugePages::require;
  config.cuda.mode = CudaMode::off;
  const machine::Needs needs = needs_of(config);
  CHECK(needs.pool_bytes == 64 * kMiB);
  CHECK(needs.control_bytes > 0);
  CHECK(needs.socket_path == "/sockets/a.sock");
  CHECK_FALSE(needs.own_directory);
  CHECK(needs.huge_pages == machine::HugePageNeed::required);
  CHECK(needs.gpus == machine::GpuNeed::none);
  CHECK(needs.io_uring == machine::IoUringNeed::none);
  config.socket.path.clear();
  CHECK(needs_of(config).own_directory);
  const auto uring = [&](const char* settings) {
    config.storage.backend = "file";
    config.storage.settings["file"] = nlohmann::ordered_json::parse(settings);
    return needs_of(config).io_uring;
  };
  CHECK(uring(R"({"directories": ["/a"]})") == machine::IoUringNeed::preferred);
  CHECK(uring(R"({"directories": ["/a"], "engine": "io_uring"})") == machine::IoUringNeed::required);
  CHECK(uring(R"({"directories": ["/a"], "engine": "threads"})") == machine::IoUringNeed::none);
  CHECK(uring(R"({"engine": 7})") == machine::IoUringNeed::none);
}

}  // namespace hicache::daemon
