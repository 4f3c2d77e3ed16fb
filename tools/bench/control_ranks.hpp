// Rank processes that only exercise the control path: started together, stopped together, each with its own
// result.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "libhicache/include/hicache/client.hpp"
#include "shm/waiting.hpp"
#include "tools/bench/child_process.hpp"
#include "tools/bench/daemon_process.hpp"
#include "tools/bench/latency_histogram.hpp"
#include "tools/bench/shared_object.hpp"

namespace hicache::bench {

constexpr std::uint32_t kMaxControlRanks = 16;

struct ControlRank {
  LatencyHistogram latency;               // read after the process has ended
  std::atomic<std::uint64_t> operations;  // counted while it runs
  std::array<char, 256> message;          // why it failed
};

struct ControlBoard {
  std::atomic<std::uint32_t> ready;
  std::atomic<std::uint32_t> start;
  std::atomic<std::uint32_t> stop;
  std::array<ControlRank, kMaxControlRanks> ranks;

  [[nodiscard]] bool stopped() const { return stop.load(std::memory_order_relaxed) != 0; }
};

// Small pages: 64 bytes, one layer.
NamespaceSpec control_spec();
// Configuration of a daemon for these benchmarks.
nlohmann::json control_config(const WaitPolicy& daemon, const WaitPolicy& client, std::uint32_t pool_pages);

// Ranks of groups of one, each its own engine, attached to one daemon.
class ControlRanks {
 public:
  // The body runs after the start signal, in the rank's process, and returns when the board says stop.
  using Body = std::function<Outcome(Session&, ControlBoard&, ControlRank&)>;
  // Starts `count` ranks; returns when all have attached. cpu: the only core they may run on, -1 = any.
  static Result<std::unique_ptr<ControlRanks>> start(const DaemonProcess& daemon, std::uint32_t count,
                                                     int cpu, const Body& body);
  void go() { board_->start.store(1, std::memory_order_relaxed); }
  // Tells them to stop and waits for them.
  Outcome stop();
  [[nodiscard]] const ControlRank& rank(std::uint32_t i) const { return board_->ranks[i]; }

 private:
  explicit ControlRanks(SharedObject<ControlBoard> board) : board_(std::move(board)) {}
  [[nodiscard]] Outcome failure() const;

  SharedObject<ControlBoard> board_;
  std::vector<ChildProcess> processes_;
};

}  // namespace hicache::bench
