#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "tools/bench/child_process.hpp"
#include "tools/bench/gpu/gpu_group.hpp"
#include "tools/bench/shared_object.hpp"
#include "tools/bench/visible_gpu.hpp"

namespace hicache::bench {

Outcome run_gpu_group(std::uint32_t ranks, std::uint32_t gpus, const GroupBody& body,
                      const ResultSink& sink) {
  if (ranks == 0 || ranks > GroupBoard::kMaxRanks || gpus == 0) {
    return Error{
        Status::invalid_argument,
        fmt::format("{} ranks on {} GPUs: expected 1 to {} ranks", ranks, gpus, GroupBoard::kMaxRanks), 0};
  }
  auto board = SharedObject<GroupBoard>::create();
  if (!board) return board.error();
  const auto run = [&](std::uint32_t rank, const Gpu& gpu, const ResultSink& send) {
    GroupMember member(**board, rank, ranks);
    Outcome done = body(member, gpu, send);
    if (!done) (*board)->abort.store(1, std::memory_order_relaxed);
    return done;
  };
  std::vector<ChildProcess> others;
  for (std::uint32_t rank = 1; rank < ranks; ++rank) {
    auto process = ChildProcess::fork_worker(fmt::format("bench-gpu-rank-{}", rank), [&, rank] {
      see_only_gpu(rank % gpus);
      const auto gpu = Gpu::open();
      const Outcome done = gpu ? run(rank, **gpu, [](const nlohmann::json&) {}) : Outcome(gpu.error());
      if (done) return 0;
      (*board)->abort.store(1, std::memory_order_relaxed);
      fmt::print(stderr, "rank {}: {}: {}\n", rank, to_string(done.status()), done.error().message);
      return 1;
    });
    if (!process) return process.error();
    others.push_back(std::move(*process));
  }
  Outcome outcome =
      run_in_rank_process([&](const Gpu& gpu, const ResultSink& send) { return run(0, gpu, send); }, sink, 0);
  if (!outcome) (*board)->abort.store(1, std::memory_order_relaxed);
  for (ChildProcess& process : others) {
    const auto status = process.wait(120'000);
    if (!status && outcome) outcome = status.error();
    if (status && *status != 0 && outcome)
      outcome = Outcome(Status::peer_lost, fmt::format("a rank exited with status {}", *status));
  }
  return outcome;
}

}  // namespace hicache::bench
