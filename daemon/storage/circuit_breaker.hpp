// Keeps a medium that does not answer from holding everybody up: after some failures in a row nothing is sent
// to it for a while, then a probe, and everything again once a probe has come back.
//
// Thread safety: none; the storage tier's own.
#pragma once

#include <cstdint>
#include <string_view>

namespace hicache::daemon {

class CircuitBreaker {
 public:
  enum class State { closed, open, probing };

  CircuitBreaker() = default;
  // Opens after `failures` in a row (0 = never) and probes `suspend_ns` later.
  CircuitBreaker(std::uint32_t failures, std::uint64_t suspend_ns)
      : threshold_(failures), suspend_ns_(suspend_ns) {}

  [[nodiscard]] State state() const { return state_; }
  [[nodiscard]] bool closed() const { return state_ == State::closed; }
  [[nodiscard]] std::uint64_t openings() const { return openings_; }
  [[nodiscard]] std::uint32_t failures() const { return failures_; }
  // When the next probe is due; meaningful while open.
  [[nodiscard]] std::uint64_t probe_at_ns() const { return probe_at_ns_; }

  // A batch timed out or failed as a whole. True when the breaker opened by it.
  bool failed(std::uint64_t now_ns) {
    ++failures_;
    if (state_ != State::closed || threshold_ == 0 || failures_ < threshold_) return false;
    open(now_ns);
    ++openings_;
    return true;
  }
  // A batch has come back.
  void succeeded() {
    if (state_ == State::closed) failures_ = 0;
  }
  // Precondition: open.
  void probe_sent() { state_ = State::probing; }
  // How the probe ended. A probe that failed may still come back late, which is an answer too.
  void probe_failed(std::uint64_t now_ns) { open(now_ns); }
  void probe_succeeded() {
    state_ = State::closed;
    failures_ = 0;
  }

 private:
  void open(std::uint64_t now_ns) {
    state_ = State::open;
    probe_at_ns_ = now_ns + suspend_ns_;
  }

  std::uint32_t threshold_ = 0;
  std::uint64_t suspend_ns_ = 0;
  State state_ = State::closed;
  std::uint32_t failures_ = 0;
  std::uint64_t probe_at_ns_ = 0;
  std::uint64_t openings_ = 0;
};

constexpr std::string_view to_string(CircuitBreaker::State state) {
  switch (state) {
    case CircuitBreaker::State::closed:
      return "closed";
    case CircuitBreaker::State::open:
      return "open";
    case CircuitBreaker::State::probing:
      return "probing";
  }
  return "unknown_state";
}

}  // namespace hicache::daemon
