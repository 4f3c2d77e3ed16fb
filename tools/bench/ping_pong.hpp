// The bare exchanges that hicache's round trip is measured against: two processes, 64 bytes there and 64
// bytes back, nothing checked, recorded or dispatched.
#pragma once

#include <cstdint>

#include "shm/status.hpp"
#include "tools/bench/latency_histogram.hpp"

namespace hicache::bench {

// How a side waits for the other's message.
enum class PingPong {
  spin,          // looks at shared memory until it is there
  park_futex,    // sleeps on a futex word each time
  park_eventfd,  // sleeps in read() of an eventfd each time
};

// Round trips that are timed as one when spinning: one alone is not much longer than reading the clock.
constexpr std::uint32_t kSpinBatch = 32;

// Runs for `seconds` with the two sides on cores `near` and `far`. Samples are ns of one round trip; spinning
// ones are means over kSpinBatch.
Result<LatencyHistogram> measure_ping_pong(PingPong kind, int near_cpu, int far_cpu, double seconds);

}  // namespace hicache::bench
