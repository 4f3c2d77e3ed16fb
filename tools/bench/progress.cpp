#include "tools/bench/progress.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>

#include "shm/clock.hpp"

namespace hicache::bench {
namespace {

constexpr std::uint64_t kRedrawNs = 200'000'000;
constexpr std::uint64_t kPrintNs = 3'000'000'000;

volatile std::sig_atomic_t interrupt_seen = 0;
void on_interrupt(int) {
  interrupt_seen = 1;
}

}  // namespace

ProgressLine::ProgressLine()
    : terminal_(::isatty(STDERR_FILENO) == 1),
      next_ns_(monotonic_ns() + (terminal_ ? kRedrawNs : kPrintNs)) {}

void ProgressLine::show(const std::string& text) {
  const std::uint64_t now = monotonic_ns();
  if (now < next_ns_) return;
  next_ns_ = now + (terminal_ ? kRedrawNs : kPrintNs);
  if (terminal_) {
    fmt::print(stderr, "\r{:<{}}", text, width_);
    width_ = std::max(width_, text.size());
  } else {
    fmt::print(stderr, "{}\n", text);
  }
  std::fflush(stderr);
}

void ProgressLine::finish() {
  if (terminal_ && width_ > 0) fmt::print(stderr, "\n");
}

void install_interrupt_handler() {
  struct sigaction action {};
  action.sa_handler = on_interrupt;
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
}

bool interrupted() {
  return interrupt_seen != 0;
}

}  // namespace hicache::bench
