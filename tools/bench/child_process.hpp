// Child processes of the benchmark: forked workers and programs that lie beside its own executable.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "shm/fd.hpp"
#include "shm/status.hpp"

namespace hicache::bench {

// What a program prints, kept in memory.
class CapturedOutput {
 public:
  static Result<CapturedOutput> create();
  [[nodiscard]] int fd() const { return fd_.get(); }
  // Its end, at most `limit` bytes.
  [[nodiscard]] std::string tail(std::size_t limit = 4000) const;

 private:
  explicit CapturedOutput(UniqueFd fd) : fd_(std::move(fd)) {}
  UniqueFd fd_;
};

// A child that is killed and reaped when the object goes. Move-only.
class ChildProcess {
 public:
  ChildProcess() = default;
  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&& other) noexcept;
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  ~ChildProcess();

  // Runs `body` in a forked child, which exits with its value and dies with this process. The parent must
  // have one thread only.
  static Result<ChildProcess> fork_worker(const std::string& label, const std::function<int()>& body);

  struct Program {
    std::vector<std::string> arguments;  // [0] = path
    int output_fd = -1;                  // standard output and error; -1 = inherited
    int cpu = -1;                        // the only core it may run on; -1 = any
  };
  // Starts a program in a process group of its own: Ctrl-C reaches it only through us. It gets SIGTERM when
  // this process dies.
  static Result<ChildProcess> start(const Program& program);

  [[nodiscard]] pid_t pid() const { return pid_; }
  // Exit status (128 + signal when killed) once it has ended, at most timeout_ms from now; timed_out
  // otherwise.
  Result<int> wait(std::uint32_t timeout_ms);
  void signal(int number) const;

 private:
  explicit ChildProcess(pid_t pid) : pid_(pid) {}
  pid_t pid_ = -1;
  bool ended_ = false;
  int status_ = 0;
};

// Path of a program beside this one.
Result<std::string> sibling_program(const std::string& name);
// Lets the calling process run on one core only.
Outcome run_on_cpu(int cpu);
// Cores that this process may use.
std::vector<int> usable_cpus();

}  // namespace hicache::bench
