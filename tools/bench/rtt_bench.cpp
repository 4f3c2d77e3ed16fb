#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <vector>

#include "shm/clock.hpp"
#include "tools/bench/control_ranks.hpp"
#include "tools/bench/machine.hpp"
#include "tools/bench/micro_bench.hpp"
#include "tools/bench/ping_pong.hpp"
#include "tools/bench/report.hpp"

namespace hicache::bench {
namespace {

using Json = nlohmann::json;

// Rounds of bare and hicache in turn, so that a slow phase of the machine meets both.
constexpr int kRounds = 3;
constexpr WaitPolicy kSpinning{1'000'000, 0, 50};
constexpr WaitPolicy kParking{0, 0, 1000};
constexpr std::uint32_t kPoolPages = 1024;
constexpr std::uint32_t kWaitMs = 5'000;

Error operation_error(const OperationResult& result) {
  return Error{result.status, fmt::format("a no-op ended with {}", to_string(result.status)), 0};
}

Outcome one_nop(Session& session) {
  const auto ticket = session.nop();
  if (!ticket) return ticket.error();
  const auto result = session.wait(*ticket, kWaitMs);
  if (!result) return result.error();
  if (result->status != Status::ok) return operation_error(*result);
  return success();
}

// No-ops one after the other until told to stop; `batch` of them are timed as one.
ControlRanks::Body closed_loop(std::uint32_t batch) {
  return [batch](Session& session, ControlBoard& board, ControlRank& rank) -> Outcome {
    std::uint64_t done = 0;
    std::uint64_t start = monotonic_ns();
    while (!board.stopped()) {
      for (std::uint32_t i = 0; i < batch; ++i) {
        if (Outcome nop = one_nop(session); !nop) return nop;
      }
      const std::uint64_t now = monotonic_ns();
      rank.latency.record((now - start) / batch);
      start = now;
      done += batch;
      rank.operations.store(done, std::memory_order_relaxed);
    }
    return success();
  };
}

void sleep_seconds(double seconds) {
  ::usleep(static_cast<useconds_t>(seconds * 1e6));
}

Result<LatencyHistogram> measure_nop(const WaitPolicy& policy, std::uint32_t batch, int rank_cpu,
                                     int daemon_cpu, double seconds) {
  auto daemon = DaemonProcess::start(control_config(policy, policy, kPoolPages), daemon_cpu);
  if (!daemon) return daemon.error();
  auto ranks = ControlRanks::start(**daemon, 1, rank_cpu, closed_loop(batch));
  if (!ranks) return ranks.error();
  (*ranks)->go();
  sleep_seconds(seconds);
  if (const Outcome stopped = (*ranks)->stop(); !stopped) return stopped.error();
  if (const Outcome stopped = (*daemon)->stop(); !stopped) return stopped.error();
  return (*ranks)->rank(0).latency;
}

// Bare exchanges and no-ops on the same two cores.
Result<Json> compare(const std::vector<std::pair<const char*, PingPong>>& bare_kinds,
                     const WaitPolicy& policy, std::uint32_t batch, int near_cpu, int far_cpu,
                     double seconds) {
  std::vector<LatencyHistogram> bare(bare_kinds.size());
  LatencyHistogram nop;
  const double slice = seconds / kRounds;
  for (int round = 0; round < kRounds; ++round) {
    for (std::size_t i = 0; i < bare_kinds.size(); ++i) {
      const auto measured = measure_ping_pong(bare_kinds[i].second, near_cpu, far_cpu, slice);
      if (!measured) return measured.error();
      bare[i].merge(*measured);
    }
    const auto measured = measure_nop(policy, batch, near_cpu, far_cpu, slice);
    if (!measured) return measured.error();
    nop.merge(*measured);
  }
  Json json;
  double best = std::numeric_limits<double>::max();
  for (std::size_t i = 0; i < bare_kinds.size(); ++i) {
    json[bare_kinds[i].first] = latency_json(bare[i]);
    best = std::min(best, bare[i].quantile(0.5));
  }
  json["nop_us"] = latency_json(nop);
  json["cores"] = {near_cpu, far_cpu};
  json["ratio_p50"] = nop.quantile(0.5) / best;
  return json;
}

Result<Json> measure_fairness(double seconds) {
  constexpr std::uint32_t kRanks = 8;
  auto daemon = DaemonProcess::start(control_config(WaitPolicy{}, WaitPolicy{}, kPoolPages));
  if (!daemon) return daemon.error();
  auto ranks = ControlRanks::start(**daemon, kRanks, -1, closed_loop(1));
  if (!ranks) return ranks.error();
  const std::uint64_t start = monotonic_ns();
  (*ranks)->go();
  sleep_seconds(seconds);
  std::vector<std::uint64_t> counts;
  for (std::uint32_t i = 0; i < kRanks; ++i) {
    counts.push_back((*ranks)->rank(i).operations.load(std::memory_order_relaxed));
  }
  const double elapsed = static_cast<double>(monotonic_ns() - start) / 1e9;
  if (const Outcome stopped = (*ranks)->stop(); !stopped) return stopped.error();
  const auto counters = (*daemon)->counters();
  if (!counters) return counters.error();
  LatencyHistogram all;
  double worst = 0;
  std::uint64_t sum = 0;
  for (std::uint32_t i = 0; i < kRanks; ++i) {
    const LatencyHistogram& latency = (*ranks)->rank(i).latency;
    all.merge(latency);
    worst = std::max(worst, latency.quantile(0.999));
    sum += counts[i];
  }
  const double mean = static_cast<double>(sum) / kRanks;
  const auto late = counters->find("late_wakes");
  return Json{
      {"ranks", kRanks},
      {"operations_per_rank", counts},
      {"operations_per_second", static_cast<double>(sum) / elapsed},
      {"slowest_to_mean", static_cast<double>(*std::min_element(counts.begin(), counts.end())) / mean},
      {"round_trip_us", latency_json(all)},
      {"worst_rank_p99_9_us", worst / 1e3},
      {"late_wakes", late == counters->end() ? 0 : late->second}};
}

Result<Json> measure_idle(double seconds) {
  constexpr std::uint32_t kRanks = 8;
  auto daemon = DaemonProcess::start(control_config(WaitPolicy{}, WaitPolicy{}, kPoolPages));
  if (!daemon) return daemon.error();
  auto ranks =
      ControlRanks::start(**daemon, kRanks, -1, [](Session& session, ControlBoard& board, ControlRank&) {
        while (!board.stopped()) ::usleep(100'000);
        const Status state = session.state();
        return state == Status::ok ? success() : Outcome(state, "the idle session ended");
      });
  if (!ranks) return ranks.error();
  (*ranks)->go();
  clockid_t clock{};
  if (::clock_getcpuclockid((*daemon)->pid(), &clock) != 0) {
    return Error{Status::system_error, "the daemon's CPU clock can't be read", 0};
  }
  sleep_seconds(0.5);  // attaching is over
  const std::uint64_t start = monotonic_ns();
  const std::uint64_t cpu_start = clock_ns(clock);
  sleep_seconds(std::max(seconds, 5.0));
  const double cpu = static_cast<double>(clock_ns(clock) - cpu_start);
  const double elapsed = static_cast<double>(monotonic_ns() - start);
  if (const Outcome stopped = (*ranks)->stop(); !stopped) return stopped.error();
  return Json{
      {"ranks", kRanks}, {"seconds", elapsed / 1e9}, {"daemon_percent_of_a_core", 100 * cpu / elapsed}};
}

}  // namespace

Result<Json> run_rtt(const MicroOptions& options) {
  const std::vector<int> cpus = usable_cpus();
  if (cpus.size() < 2) return Error{Status::not_permitted, "expected at least 2 usable cores, found 1", 0};
  Json json;
  json["machine"] = Machine::here().json();

  auto spinning =
      compare({{"bare_us", PingPong::spin}}, kSpinning, kSpinBatch, cpus[0], cpus[1], options.seconds);
  if (!spinning) return spinning;
  json["spinning"] = *spinning;
  fmt::print("no-op round trip, spinning: p50 {:.3f} us, bare {:.3f} us, ratio {:.2f} (at most 3)\n",
             (*spinning)["nop_us"]["p50"].get<double>(), (*spinning)["bare_us"]["p50"].get<double>(),
             (*spinning)["ratio_p50"].get<double>());

  for (const bool one_core : {false, true}) {
    auto parked =
        compare({{"bare_futex_us", PingPong::park_futex}, {"bare_eventfd_us", PingPong::park_eventfd}},
                kParking, 1, cpus[0], one_core ? cpus[0] : cpus[1], options.seconds);
    if (!parked) return parked;
    const char* where = one_core ? "parked_one_core" : "parked";
    json[where] = *parked;
    fmt::print(
        "no-op round trip, parked on {}: p50 {:.2f} us, bare futex {:.2f} us, bare eventfd {:.2f} us, ratio "
        "{:.2f}{}\n",
        one_core ? "one core" : "two cores", (*parked)["nop_us"]["p50"].get<double>(),
        (*parked)["bare_futex_us"]["p50"].get<double>(), (*parked)["bare_eventfd_us"]["p50"].get<double>(),
        (*parked)["ratio_p50"].get<double>(), one_core ? "" : " (at most 1.3)");
  }

  auto fairness = measure_fairness(options.seconds);
  if (!fairness) return fairness;
  json["fairness"] = *fairness;
  fmt::print(
      "eight closed-loop ranks on {} cores: {:.0f} round trips/s, slowest {:.2f} of the mean (at least 0.5), "
      "p99.9 {:.0f} us, worst rank {:.0f} us (at most 1000)\n",
      cpus.size(), (*fairness)["operations_per_second"].get<double>(),
      (*fairness)["slowest_to_mean"].get<double>(), (*fairness)["round_trip_us"]["p99_9"].get<double>(),
      (*fairness)["worst_rank_p99_9_us"].get<double>());

  auto idle = measure_idle(options.seconds);
  if (!idle) return idle;
  json["idle"] = *idle;
  fmt::print("idle daemon with 8 attached ranks: {:.3f} % of a core (less than 1)\n",
             (*idle)["daemon_percent_of_a_core"].get<double>());
  return json;
}

}  // namespace hicache::bench
