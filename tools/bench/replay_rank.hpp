// What every kind of replaying rank is: a process on the board, with a session of its own.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "hicache/client.hpp"
#include "tools/bench/rank_worker.hpp"

namespace hicache::bench {

class ReplayRank {
 public:
  // All arguments outlive the object.
  ReplayRank(const ReplayPlan& plan, const GroupPlan& group, std::uint32_t tp_rank, const Workload& workload,
             Board& board)
      : plan_(plan),
        group_(group),
        tp_rank_(tp_rank),
        shard_(group.spec.attention == Attention::mha ? tp_rank : 0),
        workload_(workload),
        board_(board),
        mine_(board.ranks[group.first_board + tp_rank]) {}

  // Tells the parent how the rank has ended; its exit code.
  int report(const Outcome& outcome) {
    // In a run that was given up, the end of the other ranks is no news.
    if (!outcome && !board_.aborted()) {
      mine_.fail(fmt::format("{}: {}", to_string(outcome.status()), outcome.error().message));
    }
    mine_.phase.store(outcome ? RankPhase::finished : RankPhase::failed, std::memory_order_release);
    if (!outcome) board_.give_up();
    return outcome ? 0 : 1;
  }

 protected:
  Outcome attach_session() {
    AttachOptions options;
    options.socket_path = plan_.socket_path;
    options.engine = group_.engine;
    options.tp_rank = tp_rank_;
    options.spec = group_.spec;
    options.io_backend = plan_.io_backend;
    auto session = Session::attach(options);
    if (!session) return session.error();
    session_ = std::move(*session);
    return success();
  }
  // Requests that every rank of the group has ended.
  [[nodiscard]] std::uint64_t group_done() const {
    std::uint64_t least = ~0ull;
    for (std::uint32_t rank = 0; rank < group_.spec.tp_size; ++rank) {
      // SYNC board-done
      least = std::min(least, board_.ranks[group_.first_board + rank].done.load(std::memory_order_acquire));
    }
    return least;
  }
  LatencyHistogram& latency(Timed timed) { return mine_.latency[static_cast<std::size_t>(timed)]; }
  // One writer: a plain addition, visible to the parent's progress line.
  static void add(std::atomic<std::uint64_t>& count, std::uint64_t n) {
    count.store(count.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }

  const ReplayPlan& plan_;
  const GroupPlan& group_;
  std::uint32_t tp_rank_;
  std::uint32_t shard_;
  const Workload& workload_;
  Board& board_;
  RankBoard& mine_;
  std::unique_ptr<Session> session_;
};

}  // namespace hicache::bench
