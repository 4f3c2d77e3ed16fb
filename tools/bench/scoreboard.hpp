// Where the rank processes of a run meet: memory shared by the parent and its forked children, with barriers,
// progress and results.
//
// SYNC board-done: a rank stores `done` (release) after a request's last completion; the others load it
// (acquire).
//   Weaker: a request could start before another rank's release was seen to have ended.
// SYNC board-turn: a rank changes a word, adds to `turn` and reads `sleepers`, all sequentially consistent; a
// sleeper
//   reads `turn`, looks at the words, adds to `sleepers` and sleeps while `turn` is unchanged. Either the
//   sleeper sees the new turn or the rank sees the sleeper. Sleeps have a time-out anyway.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string_view>

#include "tools/bench/latency_histogram.hpp"

namespace hicache::bench {

enum class RankPhase : std::uint32_t { starting = 0, ready = 1, finished = 2, failed = 3 };
enum class Timed : std::uint32_t { probe, reserve, prefetch, load, write, release, request, count_ };
constexpr std::size_t kTimedCount = static_cast<std::size_t>(Timed::count_);
constexpr std::array<const char*, kTimedCount> kTimedNames{"probe", "reserve", "prefetch", "load",
                                                           "write", "release", "request"};

// Counts of one rank. Written by it alone; the parent reads them while it runs for the progress line,
// relaxed.
struct RankCounts {
  std::atomic<std::uint64_t> requests;
  std::atomic<std::uint64_t> pages;
  std::atomic<std::uint64_t> hits;     // in the pool or in storage
  std::atomic<std::uint64_t> fetched;  // of those, from storage
  std::atomic<std::uint64_t> full_hits;
  std::atomic<std::uint64_t> written;
  std::atomic<std::uint64_t> present;
  std::atomic<std::uint64_t> filling;
  std::atomic<std::uint64_t> dropped;
  std::atomic<std::uint64_t> bytes_written;
  std::atomic<std::uint64_t> bytes_loaded;
  std::atomic<std::uint64_t> verified_words;
  std::atomic<std::uint64_t> verify_errors;
  std::atomic<std::uint64_t> failed_operations;
  std::atomic<std::uint64_t>
      probe_differences;  // requests whose probe said something else than their reserve
};

struct alignas(64) RankBoard {
  std::atomic<RankPhase> phase;
  std::atomic<std::uint64_t> done;  // SYNC board-done: requests 0 ... done - 1 have ended on this rank
  RankCounts counts;
  std::uint64_t write_busy_ns;  // time with a write in flight
  std::uint64_t load_busy_ns;
  std::array<LatencyHistogram, kTimedCount> latency;
  std::array<char, 512> message;  // the first thing that went wrong

  void fail(std::string_view text);
};

struct Board {
  static constexpr std::uint32_t kMaxRanks = 64;
  alignas(64) std::atomic<std::uint32_t> turn;
  alignas(64) std::atomic<std::uint32_t> sleepers;
  alignas(64) std::atomic<std::uint32_t> started;
  std::atomic<std::uint32_t> abort;  // set by whoever gives up: everybody ends
  std::array<RankBoard, kMaxRanks> ranks;

  // Tells everybody that a word has changed.
  void announce();
  // Sleeps until announce() was called after `turn` had the value `seen`, at most timeout_ms.
  void sleep(std::uint32_t seen, std::uint32_t timeout_ms);
  [[nodiscard]] bool aborted() const { return abort.load(std::memory_order_relaxed) != 0; }
  void give_up() {
    abort.store(1, std::memory_order_relaxed);
    announce();
  }
  // Marks a rank ready and waits for the parent's start. False when the run was given up.
  bool wait_for_start(RankBoard& rank);
};

}  // namespace hicache::bench
