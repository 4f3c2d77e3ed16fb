#include "tools/bench/control_ranks.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "shm/clock.hpp"
#include "tools/bench/bench_model.hpp"
#include "tools/bench/replay.hpp"

namespace hicache::bench {
namespace {

constexpr std::uint32_t kAttachTimeoutMs = 30'000;
constexpr std::uint32_t kStopTimeoutMs = 30'000;

Outcome run_rank(const std::string& socket_path, std::uint32_t index, int cpu, const ControlRanks::Body& body,
                 ControlBoard& board) {
  if (cpu >= 0) {
    if (Outcome pinned = run_on_cpu(cpu); !pinned) return pinned;
  }
  AttachOptions options;
  options.socket_path = socket_path;
  options.engine = fmt::format("bench-{}", index);
  options.spec = control_spec();
  auto session = Session::attach(options);
  if (!session) return session.error();
  board.ready.fetch_add(1, std::memory_order_relaxed);
  while (board.start.load(std::memory_order_relaxed) == 0 && !board.stopped()) ::usleep(500);
  Outcome outcome = body(**session, board, board.ranks[index]);
  (*session)->close();
  return outcome;
}

}  // namespace

NamespaceSpec control_spec() {
  NamespaceSpec spec;
  spec.model = "hicache-bench-control";
  spec.attention = Attention::mla;
  spec.dtype = "bfloat16";
  spec.page_tokens = 16;
  spec.layers = 1;
  spec.heads_per_shard = 1;
  spec.head_dim = 2;
  spec.element_bytes = 2;
  return spec;
}

nlohmann::json control_config(const WaitPolicy& daemon, const WaitPolicy& client, std::uint32_t pool_pages) {
  const auto waiting = [](const WaitPolicy& policy) -> nlohmann::json {
    return {{"spin_us", policy.spin_us}, {"yield_us", policy.yield_us}, {"park_ms", policy.park_ms}};
  };
  nlohmann::json config = config_with_pool(nlohmann::json::object(), control_spec(), pool_pages);
  config["name"] = fmt::format("bench-{}", ::getpid());
  config["waiting"] = waiting(daemon);
  config["client_waiting"] = waiting(client);
  config["log"]["level"] = "warn";
  return config;
}

Result<std::unique_ptr<ControlRanks>> ControlRanks::start(const DaemonProcess& daemon, std::uint32_t count,
                                                          int cpu, const Body& body) {
  auto board = SharedObject<ControlBoard>::create();
  if (!board) return board.error();
  std::unique_ptr<ControlRanks> ranks(new ControlRanks(std::move(*board)));
  for (std::uint32_t index = 0; index < count; ++index) {
    ControlBoard& shared = *ranks->board_;
    auto process = ChildProcess::fork_worker(fmt::format("bench-rank-{}", index), [&, index] {
      const Outcome outcome = run_rank(daemon.socket_path(), index, cpu, body, shared);
      if (outcome) return 0;
      const std::string text =
          fmt::format("rank {}: {}: {}", index, to_string(outcome.status()), outcome.error().message);
      auto& message = shared.ranks[index].message;
      std::copy_n(text.data(), std::min(text.size(), message.size() - 1), message.data());
      shared.stop.store(1, std::memory_order_relaxed);
      return 1;
    });
    if (!process) return process.error();
    ranks->processes_.push_back(std::move(*process));
  }
  const std::uint64_t end = monotonic_ns() + std::uint64_t{kAttachTimeoutMs} * 1'000'000;
  while (ranks->board_->ready.load(std::memory_order_relaxed) < count) {
    if (ranks->board_->stopped() || monotonic_ns() > end) {
      if (Outcome failed = ranks->stop(); !failed) return failed.error();
      return Error{Status::timed_out, fmt::format("not all of {} ranks attached", count), 0};
    }
    ::usleep(1000);
  }
  return ranks;
}

Outcome ControlRanks::stop() {
  board_->stop.store(1, std::memory_order_relaxed);
  for (ChildProcess& process : processes_) {
    const auto status = process.wait(kStopTimeoutMs);
    if (!status) return status.error();
    if (*status != 0) return failure();
  }
  return success();
}

Outcome ControlRanks::failure() const {
  for (const ControlRank& rank : board_->ranks) {
    if (rank.message[0] != '\0') return Error{Status::internal, rank.message.data(), 0};
  }
  return Error{Status::internal, "a rank process died", 0};
}

}  // namespace hicache::bench
