// The ranks of a TP group in the GPU benchmarks: a process on each GPU, in step with each other.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "shm/status.hpp"
#include "tools/bench/gpu/cuda_daemon.hpp"
#include "tools/bench/gpu/gpu.hpp"

namespace hicache::bench {

// Memory that the processes share.
struct GroupBoard {
  static constexpr std::uint32_t kMaxRanks = 64;
  // SYNC board: the last rank to arrive clears `arrived` and stores the next `phase` with release; the others
  // wait for it with acquire. What a rank wrote before it arrived is seen by all after the meeting.
  std::atomic<std::uint32_t> arrived;
  std::atomic<std::uint32_t> phase;
  std::atomic<std::uint32_t> abort;  // a rank has failed: nobody waits any more
  std::array<double, kMaxRanks> values;
};

// How long something took that all ranks began at one moment.
struct GroupTimes {
  double makespan_ns = 0;      // to the last end
  std::vector<double> own_ns;  // of each rank
};

// A rank's place in the group. Every rank calls the same methods in the same order.
class GroupMember {
 public:
  GroupMember(GroupBoard& board, std::uint32_t rank, std::uint32_t size)
      : board_(board), rank_(rank), size_(size) {}
  [[nodiscard]] std::uint32_t rank() const { return rank_; }
  [[nodiscard]] std::uint32_t size() const { return size_; }
  [[nodiscard]] bool first() const { return rank_ == 0; }

  // Waits for the others.
  Outcome meet();
  // Every rank's value.
  Result<std::vector<double>> share(double own);
  // Does something at the same time as the others.
  Result<GroupTimes> timed(const std::function<Outcome()>& body);
  // Does something on the first rank while the others wait.
  Outcome on_first(const std::function<Outcome()>& body);

 private:
  GroupBoard& board_;
  const std::uint32_t rank_;
  const std::uint32_t size_;
};

// What single large copies on all GPUs at once reach together, in 10^9 bytes a second. Called by all ranks.
struct GroupCopyRates {
  double to_device = 0;
  double to_host = 0;
};
Result<GroupCopyRates> measure_copies_at_once(GroupMember& member, const Gpu& gpu, std::uint64_t bytes);

// Runs `body` in a process for each rank; rank r sees GPU r % gpus only. What the first rank sends goes to
// `sink`. Returns what went wrong in any of them.
using GroupBody = std::function<Outcome(GroupMember&, const Gpu&, const ResultSink&)>;
Outcome run_gpu_group(std::uint32_t ranks, std::uint32_t gpus, const GroupBody& body, const ResultSink& sink);

double median_of(std::vector<double> values);

}  // namespace hicache::bench
