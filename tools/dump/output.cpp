#include "tools/dump/output.hpp"

#include <unistd.h>

#include <cerrno>

namespace hicache::inspect {

constexpr std::size_t kFlushBytes = 64 * 1024;

void Output::text(std::string_view s) {
  if (closed_) return;
  buffer_.append(s.data(), s.data() + s.size());
  end_line();
}

void Output::end_line() {
  buffer_.push_back('\n');
  if (buffer_.size() >= kFlushBytes) flush();
}

void Output::flush() {
  std::size_t done = 0;
  while (!closed_ && done < buffer_.size()) {
    const ssize_t n = ::write(fd_, buffer_.data() + done, buffer_.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      closed_ = true;
      error_ = errno == EPIPE ? 0 : errno;
      break;
    }
    done += static_cast<std::size_t>(n);
  }
  buffer_.clear();
}

}  // namespace hicache::inspect
