#include "tests/support/processes.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>

#include "shm/clock.hpp"

namespace hicache::test {
namespace {

std::uint64_t deadline_in(int timeout_ms) {
  return monotonic_ns() + static_cast<std::uint64_t>(timeout_ms) * 1'000'000;
}

void pause_briefly() {
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
}

std::runtime_error os_failure(const std::string& what) {
  return std::runtime_error(what + ": " + std::strerror(errno));
}

}  // namespace

std::string program(const std::string& name) {
  const char* dir = std::getenv("HICACHE_BIN");
  return std::string(dir != nullptr ? dir : "build/bin") + "/" + name;
}

std::vector<std::string> shm_leftovers(const std::string& region_name) {
  std::vector<std::string> found;
  const std::string prefix = "hicache." + region_name + ".";
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm", ignored)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind(prefix, 0) == 0) found.push_back(name);
  }
  return found;
}

void remove_shm_leftovers(const std::string& region_name) {
  for (const std::string& name : shm_leftovers(region_name)) ::unlink(("/dev/shm/" + name).c_str());
}

std::string unique_region_name() {
  static std::atomic<unsigned> count{0};
  std::string name = "t";
  name += std::to_string(::getpid());
  name += "-";
  name += std::to_string(count.fetch_add(1));
  return name;
}

std::size_t descriptor_count(pid_t pid) {
  std::size_t count = 0;
  std::error_code ignored;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/fd", ignored)) {
    static_cast<void>(entry);
    ++count;
  }
  return count;
}

bool eventually(const std::function<bool()>& condition, int timeout_ms) {
  const std::uint64_t deadline = deadline_in(timeout_ms);
  for (;;) {
    if (condition()) return true;
    if (monotonic_ns() >= deadline) return false;
    pause_briefly();
  }
}

TempDir::TempDir() {
  const char* base = std::getenv("TMPDIR");
  std::string pattern = std::string(base != nullptr ? base : "/tmp") + "/hicache-test-XXXXXX";
  if (::mkdtemp(pattern.data()) == nullptr) throw os_failure("mkdtemp " + pattern);
  path_ = pattern;
}

TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

void write_text(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << text;
  if (!out.flush()) throw os_failure("cannot write " + path);
}

Child Child::start(const std::function<int()>& body) {
  int out[2];
  if (::pipe2(out, O_CLOEXEC) != 0) throw os_failure("pipe2");
  UniqueFd out_read(out[0]);
  UniqueFd out_write(out[1]);
  UniqueFd err(::memfd_create("child-stderr", MFD_CLOEXEC));
  if (!err.valid()) throw os_failure("memfd_create");
  // The death signal follows the starting thread, so only the main thread may ask for it.
  const bool from_main = ::gettid() == ::getpid();
  const pid_t parent = ::getpid();
  // What this process has not printed yet must not be printed by the child as well.
  std::fflush(nullptr);
  const pid_t pid = ::fork();
  if (pid < 0) throw os_failure("fork");
  if (pid == 0) {
    if (from_main) ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (from_main && ::getppid() != parent) ::_exit(98);
    ::dup2(out_write.get(), STDOUT_FILENO);
    ::dup2(err.get(), STDERR_FILENO);
    int code = 99;
    try {
      code = body();
    } catch (const std::exception& e) {
      static_cast<void>(!::write(STDERR_FILENO, e.what(), std::strlen(e.what())));
    } catch (...) {
      code = 99;
    }
    ::_exit(code);
  }
  Child child;
  child.pid_ = pid;
  child.out_ = std::move(out_read);
  child.err_ = std::move(err);
  ::fcntl(child.out_.get(), F_SETFL, O_NONBLOCK);
  return child;
}

Child Child::spawn(const std::vector<std::string>& argv, const std::vector<std::string>& environment) {
  std::vector<std::string> variables = environment;
  for (char** e = environ; *e != nullptr; ++e) variables.emplace_back(*e);
  std::vector<char*> arguments;
  std::vector<char*> variable_pointers;
  for (const std::string& a : argv) arguments.push_back(const_cast<char*>(a.c_str()));
  for (const std::string& v : variables) variable_pointers.push_back(const_cast<char*>(v.c_str()));
  arguments.push_back(nullptr);
  variable_pointers.push_back(nullptr);
  // Between fork and exec only what is safe there, whatever threads the test has.
  return start([&]() -> int {
    ::execve(arguments[0], arguments.data(), variable_pointers.data());
    const char text[] = "cannot execute the program\n";
    static_cast<void>(!::write(STDERR_FILENO, text, sizeof text - 1));
    return 127;
  });
}

Child Child::run(const std::function<int()>& body) {
  return start(body);
}

Child::Child(Child&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      status_(std::exchange(other.status_, std::nullopt)),
      out_(std::move(other.out_)),
      err_(std::move(other.err_)),
      buffer_(std::move(other.buffer_)) {}

Child& Child::operator=(Child&& other) noexcept {
  if (this != &other) {
    end();
    pid_ = std::exchange(other.pid_, -1);
    status_ = std::exchange(other.status_, std::nullopt);
    out_ = std::move(other.out_);
    err_ = std::move(other.err_);
    buffer_ = std::move(other.buffer_);
  }
  return *this;
}

Child::~Child() {
  end();
}

void Child::end() {
  if (pid_ <= 0 || status_.has_value()) return;
  ::kill(pid_, SIGKILL);
  int raw = 0;
  while (::waitpid(pid_, &raw, 0) < 0 && errno == EINTR) {
  }
  status_ = ExitStatus{-1, SIGKILL};
}

bool Child::fill(int timeout_ms) {
  pollfd p{out_.get(), POLLIN, 0};
  if (!out_.valid() || ::poll(&p, 1, timeout_ms) <= 0) return false;
  char bytes[4096];
  const ssize_t n = ::read(out_.get(), bytes, sizeof bytes);
  if (n > 0) buffer_.append(bytes, static_cast<std::size_t>(n));
  if (n == 0) out_.reset();
  return n > 0;
}

std::optional<std::string> Child::read_line(int timeout_ms) {
  const std::uint64_t deadline = deadline_in(timeout_ms);
  for (;;) {
    if (const auto end_of_line = buffer_.find('\n'); end_of_line != std::string::npos) {
      std::string line = buffer_.substr(0, end_of_line);
      buffer_.erase(0, end_of_line + 1);
      return line;
    }
    const std::uint64_t now = monotonic_ns();
    if (!out_.valid() || now >= deadline) return std::nullopt;
    fill(static_cast<int>((deadline - now) / 1'000'000) + 1);
  }
}

std::string Child::read_all(int timeout_ms) {
  const std::uint64_t deadline = deadline_in(timeout_ms);
  while (out_.valid() && monotonic_ns() < deadline) {
    fill(static_cast<int>((deadline - monotonic_ns()) / 1'000'000) + 1);
  }
  return std::exchange(buffer_, {});
}

std::string Child::error_text() const {
  std::string text;
  char bytes[4096];
  for (;;) {
    const ssize_t n = ::pread(err_.get(), bytes, sizeof bytes, static_cast<off_t>(text.size()));
    if (n <= 0) return text;
    text.append(bytes, static_cast<std::size_t>(n));
  }
}

void Child::kill(int signal) const {
  if (pid_ > 0 && !status_.has_value()) ::kill(pid_, signal);
}

std::optional<ExitStatus> Child::wait(int timeout_ms) {
  const std::uint64_t deadline = deadline_in(timeout_ms);
  while (pid_ > 0 && !status_.has_value()) {
    int raw = 0;
    const pid_t rc = ::waitpid(pid_, &raw, WNOHANG);
    if (rc == pid_) {
      status_ = WIFEXITED(raw) ? ExitStatus{WEXITSTATUS(raw), 0} : ExitStatus{-1, WTERMSIG(raw)};
    } else if (monotonic_ns() >= deadline) {
      return std::nullopt;
    } else if (!fill(2)) {  // a child that fills its pipe must not wait for us while we wait for it
      pause_briefly();
    }
  }
  return status_;
}

RunResult run_program(const std::vector<std::string>& argv, const std::vector<std::string>& environment) {
  Child child = Child::spawn(argv, environment);
  RunResult result;
  result.status = child.wait().value_or(ExitStatus{-1, SIGALRM});
  result.out = child.read_all(1000);
  result.err = child.error_text();
  return result;
}

}  // namespace hicache::test
