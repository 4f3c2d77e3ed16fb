#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "shm/clock.hpp"
#include "tools/bench/bench_model.hpp"
#include "tools/bench/control_ranks.hpp"
#include "tools/bench/machine.hpp"
#include "tools/bench/micro_bench.hpp"
#include "tools/bench/ping_pong.hpp"

namespace hicache::bench {
namespace {

using Json = nlohmann::json;

constexpr std::uint32_t kRanks = 4;
constexpr std::uint32_t kBatch = 128;  // pages of a request
constexpr std::uint32_t kLanes = 8;    // requests that a rank has in work
constexpr std::uint32_t kPoolPages = 16'384;
constexpr std::uint32_t kWaitMs = 10'000;

// One request of the endless cycle: write new pages, find them again, go on. The pool is small, so that each
// new page evicts an old one.
struct Lane {
  enum class Step { reserve_new, write, release_new, reserve_hits, release_hits } step = Step::reserve_new;
  std::array<PrefixHash, kBatch> keys;
  std::array<DevicePage, kBatch> pages;
  std::uint64_t first_sequence = 0;
  LeaseId lease;
  std::uint32_t held = 0;  // pages of the lease
  Ticket ticket;
};

class Cycler {
 public:
  Cycler(Session& session, ControlBoard& board, ControlRank& rank)
      : session_(session), board_(board), rank_(rank), random_(session.client_slot() + 1), lanes_(kLanes) {}

  Outcome run() {
    auto memory = DeviceMemory::create(control_spec(), kBatch * kLanes);
    if (!memory) return memory.error();
    if (Outcome registered = memory->register_with(session_); !registered) return registered;
    for (std::uint32_t i = 0; i < kLanes; ++i) {
      for (std::uint32_t page = 0; page < kBatch; ++page)
        lanes_[i].pages[page] = DevicePage{i * kBatch + page};
      begin(lanes_[i]);
      if (Outcome posted = post(lanes_[i]); !posted) return posted;
    }
    while (!board_.stopped()) {
      auto result = session_.wait_any(kWaitMs);
      if (!result) return result.error();
      if (Outcome taken = take(*result); !taken) return taken;
    }
    return success();
  }

 private:
  void begin(Lane& lane) {
    for (PrefixHash& key : lane.keys) {
      for (std::uint64_t& word : key.words) word = random_();
    }
    lane.step = Lane::Step::reserve_new;
  }

  Outcome post(Lane& lane) {
    Result<Ticket> ticket = Ticket{};
    switch (lane.step) {
      case Lane::Step::reserve_new:
      case Lane::Step::reserve_hits:
        ticket = session_.reserve(++sequence_, lane.keys);
        break;
      case Lane::Step::write:
        ticket = session_.write(lane.lease, 0, lane.pages);
        break;
      case Lane::Step::release_new:
      case Lane::Step::release_hits:
        ticket = session_.release(lane.lease);
        break;
    }
    if (!ticket) return ticket.error();
    lane.ticket = *ticket;
    return success();
  }

  Outcome take(const OperationResult& result) {
    const auto at = std::find_if(lanes_.begin(), lanes_.end(),
                                 [&](const Lane& lane) { return lane.ticket == result.ticket; });
    if (at == lanes_.end())
      return Error{Status::corrupt, "a completion for an operation that was never posted", 0};
    if (result.status != Status::ok) {
      return Error{result.status,
                   fmt::format("{} ended with {}", to_string(result.opcode), to_string(result.status)), 0};
    }
    Lane& lane = *at;
    switch (lane.step) {
      case Lane::Step::reserve_new:
        lane.lease = result.lease;
        lane.step = Lane::Step::write;
        break;
      case Lane::Step::write:
        if (result.written != kBatch) return Error{Status::internal, "a write did not keep all its pages", 0};
        lane.held = result.written;
        lane.step = Lane::Step::release_new;
        break;
      case Lane::Step::reserve_hits:
        // Fewer than all when this rank was off its core for long and the others evicted them.
        lane.lease = result.lease;
        lane.held = result.hits;
        lane.step = Lane::Step::release_hits;
        break;
      case Lane::Step::release_new:
        count_released(lane);
        lane.step = Lane::Step::reserve_hits;
        break;
      case Lane::Step::release_hits:
        count_released(lane);
        begin(lane);
        break;
    }
    return post(lane);
  }

  void count_released(const Lane& lane) {
    rank_.operations.store(rank_.operations.load(std::memory_order_relaxed) + lane.held,
                           std::memory_order_relaxed);
  }

  Session& session_;
  ControlBoard& board_;
  ControlRank& rank_;
  std::mt19937_64 random_;
  std::vector<Lane> lanes_;
  std::uint64_t sequence_ = 0;
};

// Counts at one moment. Releases are counted by the ranks, the rest by the daemon.
struct Snapshot {
  std::uint64_t time_ns = 0;
  std::uint64_t cpu_ns = 0;
  DaemonCounters daemon;
  std::uint64_t released = 0;
};

Result<Snapshot> snapshot(const DaemonProcess& daemon, const ControlRanks& ranks) {
  Snapshot now;
  auto counters = daemon.counters();
  if (!counters) return counters.error();
  now.time_ns = monotonic_ns();
  now.daemon = std::move(*counters);
  for (std::uint32_t i = 0; i < kRanks; ++i) {
    now.released += ranks.rank(i).operations.load(std::memory_order_relaxed);
  }
  clockid_t clock{};
  if (::clock_getcpuclockid(daemon.pid(), &clock) == 0) now.cpu_ns = clock_ns(clock);
  return now;
}

}  // namespace

Result<Json> run_ops(const MicroOptions& options) {
  const std::vector<int> cpus = usable_cpus();
  auto daemon = DaemonProcess::start(control_config(WaitPolicy{}, WaitPolicy{}, kPoolPages));
  if (!daemon) return daemon.error();
  auto ranks =
      ControlRanks::start(**daemon, kRanks, -1, [](Session& session, ControlBoard& board, ControlRank& rank) {
        return Cycler(session, board, rank).run();
      });
  if (!ranks) return ranks.error();
  (*ranks)->go();
  ::usleep(500'000);  // the pool is full and evicts
  const auto before = snapshot(**daemon, **ranks);
  if (!before) return before.error();
  ::usleep(static_cast<useconds_t>(options.seconds * 1e6));
  const auto after = snapshot(**daemon, **ranks);
  if (!after) return after.error();
  if (const Outcome stopped = (*ranks)->stop(); !stopped) return stopped.error();
  if (const Outcome stopped = (*daemon)->stop(); !stopped) return stopped.error();

  const double seconds = static_cast<double>(after->time_ns - before->time_ns) / 1e9;
  const auto growth = [&](const char* name) {
    const auto now = after->daemon.find(name);
    const auto then = before->daemon.find(name);
    if (now == after->daemon.end() || then == before->daemon.end()) return std::uint64_t{0};
    return now->second - then->second;
  };
  const std::uint64_t hits = growth("hits");
  const std::uint64_t written = growth("written");
  const std::uint64_t evicted = growth("evicted");
  const std::uint64_t released = after->released - before->released;
  const double rate = static_cast<double>(hits + written + evicted + released) / seconds;

  // What bare shared memory does on this machine: one 64-byte message for each page operation, there and
  // back.
  double bare_rate = 0;
  if (cpus.size() >= 2) {
    const auto bare = measure_ping_pong(PingPong::spin, cpus[0], cpus[1], 1);
    if (!bare) return bare.error();
    bare_rate = 1e9 / bare->quantile(0.5);
  }
  fmt::print(
      "page operations through the coordinator, {} ranks on {} cores: {:.0f}/s (at least 500000)\n"
      "  {} hits, {} written, {} released, {} evicted in {:.2f} s; {:.0f} ring entries/s; daemon used {:.2f} "
      "cores\n"
      "  bare 64-byte exchanges: {:.0f}/s, ratio {:.2f}\n",
      kRanks, cpus.size(), rate, hits, written, released, evicted, seconds,
      static_cast<double>(growth("operations")) / seconds,
      static_cast<double>(after->cpu_ns - before->cpu_ns) / 1e9 / seconds, bare_rate,
      bare_rate > 0 ? rate / bare_rate : 0);
  return Json{{"machine", Machine::here().json()},
              {"ranks", kRanks},
              {"pages_per_request", kBatch},
              {"pool_pages", kPoolPages},
              {"seconds", seconds},
              {"page_operations_per_second", rate},
              {"hits", hits},
              {"written", written},
              {"released", released},
              {"evicted", evicted},
              {"ring_entries_per_second", static_cast<double>(growth("operations")) / seconds},
              {"daemon_cores", static_cast<double>(after->cpu_ns - before->cpu_ns) / 1e9 / seconds},
              {"bare_exchanges_per_second", bare_rate}};
}

}  // namespace hicache::bench
