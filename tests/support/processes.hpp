// Processes for tests: a child program, a forked piece of the test itself, and a daemon of one's own.
//
// Nothing here is thread-safe; every object cleans up what it started when it goes.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "shm/fd.hpp"

namespace hicache::test {

// Generous bound for things that must happen but may take long on a loaded machine. Never the thing asserted.
constexpr int kPatienceMs = 60'000;

// Path of one of the project's programs, in $HICACHE_BIN (build/bin unless set).
std::string program(const std::string& name);

// Names in /dev/shm that begin with "hicache." + region_name + ".". Empty = nothing was left behind.
std::vector<std::string> shm_leftovers(const std::string& region_name);
void remove_shm_leftovers(const std::string& region_name);
// A region name that no other test and no other run uses: "t" + pid + "-" + count.
std::string unique_region_name();
// Open descriptors of a process; 0 when it is gone.
std::size_t descriptor_count(pid_t pid);
// Looks at `condition` every few milliseconds until it holds or patience ends; returns whether it held.
bool eventually(const std::function<bool()>& condition, int timeout_ms = kPatienceMs);

// A new directory under $TMPDIR or /tmp, removed with its files when it goes.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

std::string read_text(const std::string& path);
void write_text(const std::string& path, const std::string& text);

// How a child ended: code >= 0 for exit, else the signal that killed it.
struct ExitStatus {
  int code = -1;
  int signal = 0;
  [[nodiscard]] bool exited_with(int expected) const { return signal == 0 && code == expected; }
};

// A child process. Killed with SIGKILL and reaped when it goes, unless it was waited for.
class Child {
 public:
  Child() = default;
  // Starts a program; argv[0] is its path. `environment` holds NAME=VALUE that are added to this process's.
  static Child spawn(const std::vector<std::string>& argv, const std::vector<std::string>& environment = {});
  // Runs `body` in a forked child, whose exit code is what it returns (99 when it throws). The body must not
  // use Catch assertions: they would be the child's own.
  static Child run(const std::function<int()>& body);
  Child(Child&& other) noexcept;
  Child& operator=(Child&& other) noexcept;
  ~Child();

  [[nodiscard]] pid_t pid() const { return pid_; }
  [[nodiscard]] bool valid() const { return pid_ > 0; }
  // Next line of its standard output without the newline; nothing at its end or after timeout_ms.
  std::optional<std::string> read_line(int timeout_ms = kPatienceMs);
  // Everything it has written to standard output that read_line has not returned, until its end or
  // timeout_ms.
  std::string read_all(int timeout_ms = kPatienceMs);
  // Everything it has written to standard error so far.
  [[nodiscard]] std::string error_text() const;
  void kill(int signal) const;
  // Waits for its end; nothing after timeout_ms. Its output is kept for read_line and read_all.
  std::optional<ExitStatus> wait(int timeout_ms = kPatienceMs);

 private:
  static Child start(const std::function<int()>& body);
  bool fill(int timeout_ms);
  void end();

  pid_t pid_ = -1;
  std::optional<ExitStatus> status_;
  UniqueFd out_;
  UniqueFd err_;  // memfd
  std::string buffer_;
};

// Runs a program to its end.
struct RunResult {
  ExitStatus status;
  std::string out;
  std::string err;
};
RunResult run_program(const std::vector<std::string>& argv, const std::vector<std::string>& environment = {});

// A hicached of the test's own: private name, socket and configuration, ready when the constructor returns.
// Throws std::runtime_error with the daemon's log when it does not become ready.
class TestDaemon {
 public:
  // `overrides` is JSON text merged into a small default configuration (64 MiB pool, own name and socket).
  explicit TestDaemon(const std::string& overrides = "{}");
  // Stops the daemon and removes whatever is left in /dev/shm.
  ~TestDaemon();
  TestDaemon(const TestDaemon&) = delete;
  TestDaemon& operator=(const TestDaemon&) = delete;

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const std::string& socket_path() const { return socket_path_; }
  [[nodiscard]] const std::string& config_path() const { return config_path_; }
  [[nodiscard]] const std::string& ready_line() const { return ready_line_; }
  [[nodiscard]] pid_t pid() const { return child_.pid(); }
  [[nodiscard]] Child& child() { return child_; }
  // What it has logged.
  [[nodiscard]] std::string log() const { return child_.error_text(); }

  // Rewrites the configuration file with more overrides; a running daemon takes them with SIGHUP.
  void write_config(const std::string& overrides);
  // SIGTERM and wait; the exit code, or -1 when it did not end by exit.
  int stop();
  // SIGKILL and wait. The shared memory stays.
  void kill9();
  // Starts it again after stop() or kill9(), with the configuration file as it is.
  void start();

 private:
  TempDir dir_;
  std::string name_;
  std::string socket_path_;
  std::string config_path_;
  std::string config_text_;
  std::string ready_line_;
  Child child_;
};

}  // namespace hicache::test
