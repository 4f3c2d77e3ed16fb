// Buffered standard output that survives a reader that has gone (`| head`).
#pragma once

#include <fmt/format.h>

#include <string_view>
#include <utility>

namespace hicache::inspect {

// Writes to a descriptor that it does not own. Once the reader is gone everything further is dropped quietly.
// Precondition: SIGPIPE is ignored.
class Output {
 public:
  explicit Output(int fd) : fd_(fd) {}
  ~Output() { flush(); }
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  template <class... Args>
  void line(fmt::format_string<Args...> format, Args&&... args) {
    if (closed_) return;
    fmt::format_to(std::back_inserter(buffer_), format, std::forward<Args>(args)...);
    end_line();
  }
  void text(std::string_view s);
  void flush();
  // Nobody reads any more: long loops may stop.
  [[nodiscard]] bool closed() const { return closed_; }
  // errno of a write that failed for another reason, 0 = none.
  [[nodiscard]] int error() const { return error_; }

 private:
  void end_line();

  fmt::memory_buffer buffer_;
  int fd_;
  int error_ = 0;
  bool closed_ = false;
};

}  // namespace hicache::inspect
