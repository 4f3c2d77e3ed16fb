#include "daemon/start_checks.hpp"

#include <sys/stat.h>

#include "tests/support/catch.hpp"
#include "tests/support/processes.hpp"

namespace hicache::daemon {
namespace {

// A machine of which only the cgroup matters.
class MadeUpMachine {
 public:
  MadeUpMachine(const std::string& groups, const std::string& limit_path, const std::string& limit) {
    make("/proc/self/cgroup", groups);
    make(limit_path, limit);
  }
  [[nodiscard]] std::string root() const { return dir_.path(); }

 private:
  void make(const std::string& path, const std::string& text) {
    for (std::size_t at = path.find('/', 1); at != std::string::npos; at = path.find('/', at + 1))
      ::mkdir((dir_.path() + path.substr(0, at)).c_str(), 0700);
    test::write_text(dir_.path() + path, text);
  }
  test::TempDir dir_;
};

Config config_with_pool(std::uint64_t bytes) {
  Config config;
  config.pool.bytes = bytes;
  return config;
}

}  // namespace

TEST_CASE("a cgroup limit below pool and control region is refused with both sizes and the remedy") {
  const MadeUpMachine machine("0::/docker/abc\n", "/sys/fs/cgroup/docker/abc/memory.max", "536870912\n");
  const Outcome refused = check_start_limits(config_with_pool(512 * kMiB), machine.root());
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.status() == Status::no_space);
  CHECK(refused.error().message.find("512MiB (" + machine.root()) != std::string::npos);
  CHECK(refused.error().message.find("MemoryMax=") != std::string::npos);
  CHECK(check_start_limits(config_with_pool(256 * kMiB), machine.root()).ok());
}

TEST_CASE("the tightest limit counts, in the old hierarchy too, and no limit is none") {
  const MadeUpMachine above("0::/a/b\n", "/sys/fs/cgroup/a/memory.max", "1048576\n");
  CHECK_FALSE(check_start_limits(config_with_pool(64 * kMiB), above.root()).ok());
  const MadeUpMachine old("5:cpu,memory:/a\n", "/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "1048576\n");
  CHECK_FALSE(check_start_limits(config_with_pool(64 * kMiB), old.root()).ok());
  const MadeUpMachine none("0::/a\n", "/sys/fs/cgroup/a/memory.max", "max\n");
  CHECK(check_start_limits(config_with_pool(64 * kMiB), none.root()).ok());
}

}  // namespace hicache::daemon
