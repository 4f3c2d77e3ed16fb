#include "tools/bench/child_process.hpp"

#include <fmt/format.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "shm/clock.hpp"

namespace hicache::bench {
namespace {

Error system_error(const std::string& what) {
  const int error = errno;
  return Error{Status::system_error, fmt::format("{}: {}", what, std::strerror(error)), error};
}

// A child must not outlive a parent that died between fork and prctl.
void die_with_parent(pid_t parent, int number) {
  ::prctl(PR_SET_PDEATHSIG, number);
  if (::getppid() != parent) ::_exit(127);
}

}  // namespace

Result<CapturedOutput> CapturedOutput::create() {
  UniqueFd fd(::memfd_create("hicache-bench-output", MFD_CLOEXEC));
  if (!fd.valid()) return system_error("memory for a program's output");
  return CapturedOutput(std::move(fd));
}

std::string CapturedOutput::tail(std::size_t limit) const {
  struct stat info {};
  if (::fstat(fd_.get(), &info) != 0) return {};
  const auto size = static_cast<std::size_t>(info.st_size);
  std::string text(std::min(size, limit), '\0');
  const ssize_t n = ::pread(fd_.get(), text.data(), text.size(), static_cast<off_t>(size - text.size()));
  text.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
  return text;
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)), ended_(other.ended_), status_(other.status_) {}

ChildProcess& ChildProcess::operator=(ChildProcess&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(ended_, other.ended_);
  std::swap(status_, other.status_);
  return *this;
}

ChildProcess::~ChildProcess() {
  if (pid_ < 0 || ended_) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

Result<ChildProcess> ChildProcess::fork_worker(const std::string& label, const std::function<int()>& body) {
  const pid_t parent = ::getpid();
  std::fflush(nullptr);  // or the child would print it again
  const pid_t pid = ::fork();
  if (pid < 0) return system_error("fork");
  if (pid == 0) {
    die_with_parent(parent, SIGKILL);
    ::signal(SIGINT, SIG_IGN);  // the parent ends the run in order
    ::signal(SIGTERM, SIG_DFL);
    ::prctl(PR_SET_NAME, label.c_str());
    const int rc = body();
    std::fflush(nullptr);
    ::_exit(rc);
  }
  return ChildProcess(pid);
}

Result<ChildProcess> ChildProcess::start(const Program& program) {
  std::vector<char*> arguments;
  for (const std::string& argument : program.arguments)
    arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) return system_error("fork");
  if (pid == 0) {
    die_with_parent(parent, SIGTERM);
    ::setpgid(0, 0);
    if (program.cpu >= 0 && !run_on_cpu(program.cpu)) ::_exit(126);
    if (program.output_fd >= 0) {
      ::dup2(program.output_fd, STDOUT_FILENO);
      ::dup2(program.output_fd, STDERR_FILENO);
    }
    ::execv(arguments[0], arguments.data());
    ::_exit(127);
  }
  return ChildProcess(pid);
}

Result<int> ChildProcess::wait(std::uint32_t timeout_ms) {
  const std::uint64_t end = monotonic_ns() + std::uint64_t{timeout_ms} * 1'000'000;
  while (!ended_) {
    int status = 0;
    const pid_t pid = ::waitpid(pid_, &status, WNOHANG);
    if (pid < 0) return system_error(fmt::format("waiting for process {}", pid_));
    if (pid == pid_) {
      ended_ = true;
      status_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      break;
    }
    if (monotonic_ns() >= end) {
      return Error{Status::timed_out, fmt::format("process {} still runs after {} ms", pid_, timeout_ms), 0};
    }
    ::usleep(1000);
  }
  return status_;
}

void ChildProcess::signal(int number) const {
  if (pid_ > 0 && !ended_) ::kill(pid_, number);
}

Result<std::string> sibling_program(const std::string& name) {
  std::string path(4096, '\0');
  const ssize_t n = ::readlink("/proc/self/exe", path.data(), path.size());
  if (n <= 0) return system_error("reading /proc/self/exe");
  path.resize(static_cast<std::size_t>(n));
  path = path.substr(0, path.rfind('/') + 1) + name;
  if (::access(path.c_str(), X_OK) != 0) return system_error(path);
  return path;
}

Outcome run_on_cpu(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<std::size_t>(cpu), &set);
  if (::sched_setaffinity(0, sizeof set, &set) != 0)
    return system_error(fmt::format("running on core {}", cpu));
  return success();
}

std::vector<int> usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cpus;
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(static_cast<std::size_t>(cpu), &set)) cpus.push_back(cpu);
  }
  return cpus;
}

}  // namespace hicache::bench
