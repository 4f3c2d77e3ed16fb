#include "tests/crash/stepping/single_step.hpp"

#include <sched.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <stdexcept>

#include "shm/clock.hpp"
#include "tests/support/processes.hpp"

namespace hicache::test {

std::string SteppedProcess::why_not() {
  const pid_t pid = ::fork();
  if (pid == 0) {
    if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(errno);
    ::raise(SIGSTOP);
    ::_exit(0);
  }
  int status = 0;
  if (::waitpid(pid, &status, 0) != pid) return "waitpid failed";
  if (WIFEXITED(status)) return std::string("ptrace: ") + std::strerror(WEXITSTATUS(status));
  std::string why;
  if (::ptrace(PTRACE_SINGLESTEP, pid, nullptr, nullptr) != 0) {
    why = std::string("ptrace can't single-step: ") + std::strerror(errno);
  } else if (::waitpid(pid, &status, 0) != pid || !WIFSTOPPED(status) || WSTOPSIG(status) != SIGTRAP) {
    why = "a single step did not end with SIGTRAP";
  }
  ::kill(pid, SIGKILL);
  ::waitpid(pid, &status, 0);
  return why;
}

SteppedProcess::SteppedProcess(const std::function<void()>& body) {
  std::fflush(nullptr);
  pid_ = ::fork();
  if (pid_ < 0) throw std::runtime_error("fork failed");
  if (pid_ == 0) {
    if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(98);
    try {
      mark();  // so that the parent's options hold from the start
      body();
    } catch (const std::exception& e) {
      std::fprintf(stderr, "stepped process: %s\n", e.what());
      ::_exit(99);
    }
    ::_exit(0);
  }
  if (!await_stop() || ::ptrace(PTRACE_SETOPTIONS, pid_, nullptr, PTRACE_O_EXITKILL) != 0) {
    throw std::runtime_error("the child can't be traced");
  }
}

SteppedProcess::~SteppedProcess() {
  kill9();
}

void SteppedProcess::kill9() {
  if (reaped_) return;
  ::kill(pid_, SIGKILL);
  while (!reaped_ && ::waitpid(pid_, &status_, __WALL) == pid_) {
    reaped_ = !WIFSTOPPED(status_);
  }
  reaped_ = true;
}

void SteppedProcess::mark() {
  ::raise(SIGSTOP);
}

// A child that only has no processor is not asleep.
bool SteppedProcess::asleep() const {
  std::ifstream file("/proc/" + std::to_string(pid_) + "/stat");
  std::string stat;
  std::getline(file, stat);
  const auto name_end = stat.rfind(')');  // the name may hold anything
  return name_end != std::string::npos && stat.compare(name_end + 1, 2, " S") == 0;
}

bool SteppedProcess::await_stop() {
  constexpr int kLooks = 200;  // before the child may be taken to wait for something
  const std::uint64_t limit = monotonic_ns() + std::uint64_t{kPatienceMs} * 1'000'000;
  for (int looks = 0;; ++looks) {
    const pid_t got = ::waitpid(pid_, &status_, WNOHANG);
    if (got == pid_) break;
    if (got < 0 && errno != EINTR) throw std::runtime_error("waitpid failed");
    // Not for a child that is about to stop: the test has yet to look at what its last instruction did.
    if (looks > kLooks && serve_ && asleep()) serve_();
    if (looks % 1024 == 1023 && monotonic_ns() > limit) throw std::runtime_error("the stepped process hangs");
    ::sched_yield();
  }
  reaped_ = !WIFSTOPPED(status_);
  signal_ = reaped_ ? 0 : WSTOPSIG(status_);
  return !reaped_;
}

void SteppedProcess::go_on(int request, int signal) {
  if (::ptrace(static_cast<__ptrace_request>(request), pid_, nullptr, signal) != 0) {
    throw std::runtime_error(std::string("ptrace: ") + std::strerror(errno));
  }
}

bool SteppedProcess::run_to_mark() {
  int signal = 0;
  for (;;) {
    go_on(PTRACE_CONT, signal);
    if (!await_stop()) return false;
    if (signal_ == SIGSTOP) return true;
    signal = signal_ == SIGTRAP ? 0 : signal_;
  }
}

SteppedProcess::Walk SteppedProcess::step_to_mark(const std::function<bool()>& look) {
  int signal = 0;
  for (;;) {
    go_on(PTRACE_SINGLESTEP, signal);
    if (!await_stop()) return Walk::ended;
    if (signal_ == SIGSTOP) return Walk::at_mark;
    signal = signal_ == SIGTRAP ? 0 : signal_;
    ++instructions_;
    if (!look()) return Walk::stopped_by_look;
  }
}

std::string SteppedProcess::end() const {
  if (!reaped_) return "still running";
  if (WIFEXITED(status_)) return "exit status " + std::to_string(WEXITSTATUS(status_));
  return "signal " + std::to_string(WTERMSIG(status_));
}

}  // namespace hicache::test
