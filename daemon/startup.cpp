#include "daemon/startup.hpp"

#include <fcntl.h>
#include <malloc.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "daemon/stderr_log.hpp"

namespace hicache::daemon {
namespace {

Error os_error(const std::string& what) {
  const int code = errno;
  return Error{Status::system_error, what + ": " + std::strerror(code), code};
}

}  // namespace

Outcome configure_logging(const Config::Log& log) {
  try {
    auto logger = log.file.empty()
                      ? std::make_shared<spdlog::logger>("hicached", std::make_shared<StderrLog>())
                      : spdlog::basic_logger_mt("hicached", log.file, false);
    logger->set_pattern("%Y-%m-%dT%H:%M:%S.%e %l hicached[%P] %v");
    logger->set_level(spdlog::level::from_str(log.level));
    logger->flush_on(spdlog::level::trace);
    spdlog::set_default_logger(std::move(logger));
  } catch (const spdlog::spdlog_ex& e) {
    return Error{Status::system_error, "log.file: " + std::string(e.what()), 0};
  }
  return success();
}

void keep_freed_memory() {
#ifdef __GLIBC__
  constexpr int kKept = 64 << 20;
  ::mallopt(M_MMAP_THRESHOLD, 32 << 20);  // glibc's own maximum
  ::mallopt(M_TRIM_THRESHOLD, kKept);
#endif
}

void raise_limits() {
  const auto raise = [](auto resource, const char* what) {
    rlimit limit{};
    if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
    limit.rlim_cur = limit.rlim_max;
    if (::setrlimit(resource, &limit) != 0)
      spdlog::warn("cannot raise the limit of {} to {}: {}", what, limit.rlim_max, std::strerror(errno));
  };
  raise(RLIMIT_NOFILE, "open descriptors");
  raise(RLIMIT_MEMLOCK, "locked memory");
}

Result<UniqueFd> capture_signals() {
  std::signal(SIGPIPE, SIG_IGN);
  sigset_t set;
  ::sigemptyset(&set);
  ::sigaddset(&set, SIGTERM);
  ::sigaddset(&set, SIGINT);
  ::sigaddset(&set, SIGHUP);
  if (const int rc = ::pthread_sigmask(SIG_BLOCK, &set, nullptr); rc != 0) {
    errno = rc;
    return os_error("cannot block signals");
  }
  UniqueFd fd(::signalfd(-1, &set, SFD_CLOEXEC));
  if (!fd.valid()) return os_error("signalfd");
  return fd;
}

Result<Detachment> Detachment::detach() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return os_error("pipe2");
  UniqueFd reader(ends[0]);
  UniqueFd writer(ends[1]);
  const pid_t pid = ::fork();
  if (pid < 0) return os_error("fork");
  if (pid == 0) {
    ::setsid();
    return Detachment(std::move(writer));
  }
  writer.reset();
  char byte = 0;
  ssize_t n = 0;
  do n = ::read(reader.get(), &byte, 1);
  while (n < 0 && errno == EINTR);
  if (n == 1) ::_exit(0);
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  ::_exit(WIFEXITED(status) ? std::max(WEXITSTATUS(status), 1) : 1);
}

void Detachment::ready() {
  // Standard error stays: without log.file it is where the log goes.
  UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  if (null.valid()) {
    ::dup2(null.get(), STDIN_FILENO);
    ::dup2(null.get(), STDOUT_FILENO);
  }
  const char byte = 1;
  if (::write(pipe_.get(), &byte, 1) != 1) spdlog::warn("the process that started this daemon is gone");
  pipe_.reset();
}

void notify_service_manager(const std::string& state) {
  const char* path = std::getenv("NOTIFY_SOCKET");
  if (path == nullptr || (path[0] != '/' && path[0] != '@')) return;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::size_t length = std::strlen(path);
  if (length >= sizeof address.sun_path) return;
  std::memcpy(address.sun_path, path, length);
  if (path[0] == '@') address.sun_path[0] = '\0';
  const UniqueFd fd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return;
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + length);
  if (::sendto(fd.get(), state.data(), state.size(), MSG_NOSIGNAL,
               reinterpret_cast<const sockaddr*>(&address), size) < 0) {
    spdlog::warn("cannot tell the service manager '{}': {}", state, std::strerror(errno));
  }
}

}  // namespace hicache::daemon
