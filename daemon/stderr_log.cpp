#include "daemon/stderr_log.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <string>

namespace hicache::daemon {
namespace {

// Room for this many bytes is there when poll says that there is room at all: a pipe has a whole buffer free,
// and a socket or terminal has more.
constexpr std::size_t kPieceBytes = PIPE_BUF;

bool has_room() {
  pollfd p{STDERR_FILENO, POLLOUT, 0};
  return ::poll(&p, 1, 0) > 0;  // a pipe that nobody reads any more answers at once, too
}

}  // namespace

bool StderrLog::write_if_room(std::string_view line) {
  while (!line.empty()) {
    if (!has_room()) return false;
    const ssize_t n = ::write(STDERR_FILENO, line.data(), std::min(line.size(), kPieceBytes));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return false;
    line.remove_prefix(static_cast<std::size_t>(n));
  }
  return true;
}

void StderrLog::sink_it_(const spdlog::details::log_msg& message) {
  spdlog::memory_buf_t line;
  formatter_->format(message, line);
  if (lost_ > 0) {
    const std::string note =
        "hicached: " + std::to_string(lost_) + " lines of the log were lost, nobody read it\n";
    if (!write_if_room(note)) {
      ++lost_;
      return;
    }
    lost_ = 0;
  }
  if (!write_if_room({line.data(), line.size()})) ++lost_;
}

}  // namespace hicache::daemon
