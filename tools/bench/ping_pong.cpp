#include "tools/bench/ping_pong.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>

#include "shm/clock.hpp"
#include "shm/fd.hpp"
#include "shm/futex.hpp"
#include "shm/waiting.hpp"
#include "tools/bench/child_process.hpp"
#include "tools/bench/shared_object.hpp"

namespace hicache::bench {
namespace {

constexpr std::uint64_t kPatienceNs = 1'000'000'000;  // a lost peer must not hang the benchmark

// One direction: a cache line of data.
// SYNC ping-publish: `sequence` store (release) after the payload -> load (acquire) before it is read.
// Weaker: the
//   reader could take the payload of the message before.
struct alignas(64) Line {
  std::array<std::atomic<std::uint64_t>, 7> payload;
  std::atomic<std::uint32_t> sequence;
  std::atomic<std::uint32_t> padding;
};
static_assert(sizeof(Line) == 64);

struct Table {
  Line there;
  Line back;
  alignas(64) std::atomic<std::uint32_t> stop;
  LatencyHistogram latency;
};

class Side {
 public:
  Side(PingPong kind, Line& out, Line& in, int out_event, int in_event)
      : kind_(kind), out_(out), in_(in), out_event_(out_event), in_event_(in_event) {}

  void send(std::uint32_t sequence) {
    for (auto& word : out_.payload) word.store(sequence, std::memory_order_relaxed);
    out_.sequence.store(sequence, std::memory_order_release);  // SYNC ping-publish
    if (kind_ == PingPong::park_futex) futex_wake_all(&out_.sequence);
    if (kind_ == PingPong::park_eventfd) {
      const std::uint64_t one = 1;
      // The counter can't overflow: the other side reads it before it answers.
      [[maybe_unused]] const auto n = ::write(out_event_, &one, sizeof one);
    }
  }
  // False when the other side stopped.
  bool receive(std::uint32_t sequence, const std::atomic<std::uint32_t>& stop) {
    std::uint32_t seen = in_.sequence.load(std::memory_order_acquire);  // SYNC ping-publish
    while (seen != sequence) {
      if (stop.load(std::memory_order_relaxed) != 0) return false;
      switch (kind_) {
        case PingPong::spin:
          cpu_relax();
          break;
        case PingPong::park_futex:
          futex_wait(&in_.sequence, seen, kPatienceNs);
          break;
        case PingPong::park_eventfd: {
          std::uint64_t count = 0;
          if (::read(in_event_, &count, sizeof count) < 0 && errno != EINTR) return false;
          break;
        }
      }
      seen = in_.sequence.load(std::memory_order_acquire);  // SYNC ping-publish
    }
    for (const auto& word : in_.payload) {
      if (word.load(std::memory_order_relaxed) != sequence) return false;
    }
    return true;
  }

 private:
  PingPong kind_;
  Line& out_;
  Line& in_;
  int out_event_;
  int in_event_;
};

void ping(PingPong kind, Table& table, Side side, double seconds) {
  const std::uint32_t batch = kind == PingPong::spin ? kSpinBatch : 1;
  std::uint32_t sequence = 0;
  std::uint64_t start = monotonic_ns();
  const std::uint64_t end = start + static_cast<std::uint64_t>(seconds * 1e9);
  while (start < end) {
    for (std::uint32_t i = 0; i < batch; ++i) {
      side.send(++sequence);
      if (!side.receive(sequence, table.stop)) return;
    }
    const std::uint64_t now = monotonic_ns();
    table.latency.record((now - start) / batch);
    start = now;
  }
}

void pong(Table& table, Side side) {
  for (std::uint32_t sequence = 1; side.receive(sequence, table.stop); ++sequence) side.send(sequence);
}

}  // namespace

Result<LatencyHistogram> measure_ping_pong(PingPong kind, int near_cpu, int far_cpu, double seconds) {
  auto table = SharedObject<Table>::create();
  if (!table) return table.error();
  const UniqueFd there(::eventfd(0, EFD_CLOEXEC));
  const UniqueFd back(::eventfd(0, EFD_CLOEXEC));
  auto far = ChildProcess::fork_worker("bench-pong", [&] {
    if (!run_on_cpu(far_cpu)) return 1;
    pong(**table, Side(kind, (*table)->back, (*table)->there, back.get(), there.get()));
    return 0;
  });
  if (!far) return far.error();
  auto near = ChildProcess::fork_worker("bench-ping", [&] {
    if (!run_on_cpu(near_cpu)) return 1;
    ping(kind, **table, Side(kind, (*table)->there, (*table)->back, there.get(), back.get()), seconds);
    (*table)->stop.store(1, std::memory_order_relaxed);
    futex_wake_all(&(*table)->there.sequence);
    const std::uint64_t one = 1;
    return ::write(there.get(), &one, sizeof one) == sizeof one ? 0 : 1;
  });
  if (!near) return near.error();
  for (ChildProcess* side : {&*near, &*far}) {
    const auto status = side->wait(static_cast<std::uint32_t>(seconds * 1000) + 10'000);
    if (!status) return status.error();
    if (*status != 0) return Error{Status::system_error, "a side of the bare ping-pong failed", 0};
  }
  return (*table)->latency;
}

}  // namespace hicache::bench
