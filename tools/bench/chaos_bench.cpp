#include "tools/bench/chaos_bench.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "shm/clock.hpp"
#include "tools/bench/daemon_process.hpp"
#include "tools/bench/machine.hpp"
#include "tools/bench/progress.hpp"
#include "tools/bench/prompt_rank.hpp"
#include "tools/bench/shared_object.hpp"

namespace hicache::bench {
namespace {

using Json = nlohmann::json;

constexpr std::uint32_t kEngines = 2;
constexpr std::uint32_t kTpSize = 4;
constexpr std::uint32_t kRanks = kEngines * kTpSize;
constexpr std::uint32_t kPromptPages = 16;
constexpr std::uint32_t kPrompts = 200;
constexpr std::uint64_t kPageBytes = 16 * kKiB;
constexpr std::uint64_t kPoolBytes = 64 * kMiB;
constexpr std::uint32_t kDeadlineMs = 1500;
constexpr std::uint64_t kMs = 1'000'000;
constexpr std::uint64_t kIntervalNs = 5000 * kMs;
constexpr std::uint64_t kBetweenKillsNs = 1800 * kMs;

// What a rank tells: written by it alone. It outlives the rank.
struct RankBoard {
  std::atomic<std::uint64_t> operations{0};
  std::atomic<std::uint64_t> pages_loaded{0};
  std::atomic<std::uint64_t> pages_written{0};
  std::atomic<std::uint64_t> wrong_words{0};
  std::atomic<std::uint64_t> attaches{0};
  std::atomic<std::uint64_t> longest_wait_ns{0};
  std::atomic<std::uint64_t> lost_ns{0};                        // when it last heard that the daemon was gone
  std::atomic<std::uint64_t> peer_lost_ns{0};                   // ... that a rank of its group was
  std::atomic<std::uint64_t> first_hit_ns{0};                   // first compared page of the latest session
  std::array<std::atomic<std::uint64_t>, kStatusCount> ends{};  // how its sessions ended
};
struct Boards {
  std::array<RankBoard, kRanks> ranks;
  std::atomic<bool> stop{false};
};

void work(const PromptRankOptions& options, const NamespaceSpec& spec, const DeviceMemory& memory,
          RankBoard& board, const std::atomic<bool>& stop) {
  auto rank = PromptRank::attach(options, spec, memory);
  if (!rank) {
    ::usleep(20'000);
    return;
  }
  ++board.attaches;
  bool hit = false;
  for (std::uint32_t n = 0; !stop;) {
    const auto done = (*rank)->request(prompt_keys(n * 7919 % kPrompts, kPromptPages), kPromptPages, true);
    board.longest_wait_ns = std::max(board.longest_wait_ns.load(), (*rank)->longest_wait_ns());
    if (!done) {
      // The group is not complete yet, or a ring is full for a moment.
      if (done.status() == Status::again) {
        ::usleep(2'000);
        continue;
      }
      if (done.status() == Status::daemon_lost) board.lost_ns = monotonic_ns();
      if (done.status() == Status::peer_lost) board.peer_lost_ns = monotonic_ns();
      ++board.ends[static_cast<std::size_t>(done.status())];
      return;
    }
    ++n;
    board.operations += done->operations;
    board.pages_loaded += done->hits;
    board.pages_written += done->written;
    board.wrong_words += done->wrong_words;
    if (done->hits > 0 && !hit) {
      hit = true;
      board.first_hit_ns = monotonic_ns();
    }
  }
}

struct Span {
  std::uint64_t count = 0;
  double sum_ms = 0;
  double longest_ms = 0;
  void add(std::uint64_t from_ns, std::uint64_t to_ns) {
    const double ms = static_cast<double>(to_ns - from_ns) / 1e6;
    ++count;
    sum_ms += ms;
    longest_ms = std::max(longest_ms, ms);
  }
  [[nodiscard]] Json json() const {
    return Json{{"count", count},
                {"mean_ms", count == 0 ? 0.0 : sum_ms / static_cast<double>(count)},
                {"longest_ms", longest_ms}};
  }
};

class Chaos {
 public:
  Chaos(const ChaosOptions& options, NamespaceSpec spec, DaemonProcess& daemon, Boards& boards)
      : options_(options), spec_(std::move(spec)), daemon_(daemon), boards_(boards), random_(options.seed) {}

  Outcome run() {
    for (std::uint32_t i = 0; i < kRanks; ++i) {
      if (Outcome started = start_rank(i); !started) return started;
    }
    const std::uint64_t begin = monotonic_ns();
    const std::uint64_t end = begin + static_cast<std::uint64_t>(options_.minutes * 60e9);
    std::uint64_t next_kill = begin + 1000 * kMs;
    std::uint64_t next_interval = begin + kIntervalNs;
    while (monotonic_ns() < end && !interrupted()) {
      if (monotonic_ns() >= next_interval) {
        count_interval();
        next_interval += kIntervalNs;
      }
      if (monotonic_ns() >= next_kill) {
        if (Outcome hurt = strike(); !hurt) return hurt;
        next_kill = monotonic_ns() + kBetweenKillsNs - random_() % (600 * kMs);
      }
      watch();
      ::usleep(2'000);
      progress_.show(fmt::format("{} kills, {} stops, {} operations", rank_kills_ + daemon_kills_, stops_,
                                 operations()));
    }
    progress_.finish();
    elapsed_s_ = static_cast<double>(monotonic_ns() - begin) / 1e9;
    if (stopped_ >= 0) ranks_[static_cast<std::size_t>(stopped_)].signal(SIGCONT);
    boards_.stop = true;
    for (ChildProcess& rank : ranks_) {
      if (const auto status = rank.wait(20'000); !status) return Error{Status::timed_out, "a rank hangs", 0};
    }
    return daemon_.await_answer();
  }

  [[nodiscard]] Json json() const {
    std::uint64_t loaded = 0, written = 0, wrong = 0, attaches = 0, longest = 0;
    std::map<std::string, std::uint64_t> ends;
    for (const RankBoard& b : boards_.ranks) {
      loaded += b.pages_loaded;
      written += b.pages_written;
      wrong += b.wrong_words;
      attaches += b.attaches;
      longest = std::max(longest, b.longest_wait_ns.load());
      for (std::size_t s = 0; s < b.ends.size(); ++s) {
        if (b.ends[s] > 0) ends[std::string(to_string(static_cast<Status>(s)))] += b.ends[s];
      }
    }
    return Json{{"seconds", elapsed_s_},
                {"kills", rank_kills_ + daemon_kills_},
                {"kills_per_minute", (rank_kills_ + daemon_kills_) / (elapsed_s_ / 60)},
                {"rank_kills", rank_kills_},
                {"daemon_kills", daemon_kills_},
                {"stops", stops_},
                {"operations", operations()},
                {"operations_by_interval", intervals_},
                {"interval_s", kIntervalNs / 1e9},
                {"pages_loaded", loaded},
                {"pages_written", written},
                {"verify_errors", wrong},
                {"attaches", attaches},
                {"session_ends", ends},
                {"longest_wait_ms", static_cast<double>(longest) / 1e6},
                {"deadline_ms", kDeadlineMs},
                {"daemon_loss_noticed", noticed_daemon_.json()},
                {"rank_loss_noticed", noticed_rank_.json()},
                {"first_hit_after_restart", first_hit_.json()},
                {"daemon_end_after_kill", daemon_end_.json()}};
  }
  [[nodiscard]] bool healthy() const {
    const Json j = json();
    const bool steady =
        std::all_of(intervals_.begin(), intervals_.end(), [](std::uint64_t n) { return n > 0; });
    return steady && operations() > 0 && j["verify_errors"] == 0 && j["kills_per_minute"].get<double>() >= 20;
  }

 private:
  [[nodiscard]] std::uint64_t operations() const {
    std::uint64_t n = 0;
    for (const RankBoard& b : boards_.ranks) n += b.operations;
    return n;
  }
  void count_interval() {
    const std::uint64_t n = operations();
    intervals_.push_back(n - counted_);
    counted_ = n;
  }

  Outcome start_rank(std::uint32_t i) {
    auto child = ChildProcess::fork_worker(fmt::format("chaos-rank-{}", i), [this, i]() -> int {
      PromptRankOptions rank;
      rank.socket_path = daemon_.socket_path();
      rank.engine = fmt::format("engine-{}", i / kTpSize);
      rank.tp_rank = i % kTpSize;
      rank.deadline_ms = kDeadlineMs;
      rank.attach_ms = 1000;
      auto memory = DeviceMemory::create(spec_, kPromptPages);
      if (!memory) return 1;
      while (!boards_.stop) work(rank, spec_, *memory, boards_.ranks[i], boards_.stop);
      return 0;
    });
    if (!child) return child.error();
    ranks_[i] = std::move(*child);
    return success();
  }

  Outcome strike() {
    const auto dice = random_() % 10;
    if (dice < 3) return kill_daemon();
    const auto i = static_cast<std::uint32_t>(random_() % kRanks);
    if (dice < 5 && stopped_ < 0) {
      ranks_[i].signal(SIGSTOP);
      ++stops_;
      stopped_ = static_cast<int>(i);
      go_on_ns_ = monotonic_ns() + 1000 * kMs + random_() % (2000 * kMs);
      return success();
    }
    if (stopped_ == static_cast<int>(i)) stopped_ = -1;
    rank_killed_ns_ = monotonic_ns();
    killed_engine_ = i / kTpSize;
    ranks_[i].signal(SIGKILL);
    if (const auto status = ranks_[i].wait(10'000); !status) return status.error();
    ++rank_kills_;
    return start_rank(i);
  }

  Outcome kill_daemon() {
    const std::uint64_t killed = monotonic_ns();
    if (Outcome gone = daemon_.kill(); !gone) return gone;
    ended_ns_ = monotonic_ns();
    daemon_end_.add(killed, ended_ns_);
    daemon_killed_ns_ = killed;
    awaiting_hit_ = true;
    ++daemon_kills_;
    return daemon_.spawn();
  }

  void watch() {
    if (stopped_ >= 0 && monotonic_ns() >= go_on_ns_) {
      ranks_[static_cast<std::size_t>(stopped_)].signal(SIGCONT);
      stopped_ = -1;
    }
    for (std::uint32_t i = 0; i < kRanks; ++i) {
      const RankBoard& b = boards_.ranks[i];
      if (daemon_killed_ns_ != 0 && b.lost_ns > daemon_killed_ns_) {
        noticed_daemon_.add(daemon_killed_ns_, b.lost_ns);
        daemon_killed_ns_ = 0;
      }
      if (rank_killed_ns_ != 0 && i / kTpSize == killed_engine_ && b.peer_lost_ns > rank_killed_ns_) {
        noticed_rank_.add(rank_killed_ns_, b.peer_lost_ns);
        rank_killed_ns_ = 0;
      }
      if (awaiting_hit_ && b.first_hit_ns > ended_ns_) {
        first_hit_.add(ended_ns_, b.first_hit_ns);
        awaiting_hit_ = false;
      }
    }
  }

  const ChaosOptions options_;
  const NamespaceSpec spec_;
  DaemonProcess& daemon_;
  Boards& boards_;
  std::mt19937 random_;
  ProgressLine progress_;
  std::array<ChildProcess, kRanks> ranks_;
  int stopped_ = -1;
  std::uint64_t go_on_ns_ = 0, ended_ns_ = 0, daemon_killed_ns_ = 0, rank_killed_ns_ = 0;
  std::uint32_t killed_engine_ = 0;
  bool awaiting_hit_ = false;
  std::uint32_t rank_kills_ = 0, daemon_kills_ = 0, stops_ = 0;
  std::uint64_t counted_ = 0;
  std::vector<std::uint64_t> intervals_;
  double elapsed_s_ = 0;
  Span noticed_daemon_, noticed_rank_, first_hit_, daemon_end_;
};

Result<bool> dump_is_clean(const std::string& name) {
  auto tool = sibling_program("hicache-dump");
  if (!tool) return tool.error();
  auto output = CapturedOutput::create();
  if (!output) return output.error();
  ChildProcess::Program run;
  run.arguments = {*tool, name, "--check"};
  run.output_fd = output->fd();
  auto process = ChildProcess::start(run);
  if (!process) return process.error();
  const auto status = process->wait(60'000);
  if (!status) return status.error();
  if (*status != 0) fmt::print(stderr, "hicache-dump --check:\n{}\n", output->tail());
  return *status == 0;
}

}  // namespace

Result<Json> run_chaos(const ChaosOptions& options) {
  const auto spec = make_spec(Attention::mha, kTpSize, kPageBytes);
  if (!spec) return spec.error();
  auto boards = SharedObject<Boards>::create();
  if (!boards) return boards.error();
  auto daemon = DaemonProcess::start(Json{{"name", fmt::format("bench-chaos-{}", ::getpid())},
                                          {"pool", {{"bytes", kPoolBytes}}},
                                          {"integrity", {{"checksums", "always"}, {"verify", "lazy"}}}});
  if (!daemon) return daemon.error();
  Chaos chaos(options, *spec, **daemon, **boards);
  if (Outcome ran = chaos.run(); !ran) return ran.error();
  const auto counters = (*daemon)->counters();
  if (!counters) return counters.error();
  const auto clean = dump_is_clean((*daemon)->name());
  if (!clean) return clean.error();
  if (Outcome stopped = (*daemon)->stop(); !stopped) return stopped.error();
  Json answer = chaos.json();
  answer["machine"] = Machine::here().json();
  answer["takeovers"] = counters->at("takeovers");
  answer["pages_kept"] = counters->at("pages_kept");
  answer["pages_not_kept"] = counters->at("pages_not_kept");
  answer["checksum_mismatches"] = counters->at("checksum_mismatches");
  answer["late_wakes"] = counters->at("late_wakes");
  answer["dump_check_clean"] = *clean;
  answer["success"] = chaos.healthy() && *clean && answer["checksum_mismatches"] == 0;
  fmt::print(
      "chaos: {:.0f} s, {} kills ({} of the daemon), {} stops; {} operations, {} wrong words\n"
      "  longest wait {:.0f} ms at a deadline of {} ms; daemon's death noticed after {:.1f} ms at most, a "
      "rank's {:.1f}\n"
      "  first hit {:.0f} ms after the old daemon's end on average; {} takeovers kept {} pages and dropped "
      "{}\n",
      answer["seconds"].get<double>(), answer["kills"].get<int>(), answer["daemon_kills"].get<int>(),
      answer["stops"].get<int>(), answer["operations"].get<std::uint64_t>(),
      answer["verify_errors"].get<std::uint64_t>(), answer["longest_wait_ms"].get<double>(), kDeadlineMs,
      answer["daemon_loss_noticed"]["longest_ms"].get<double>(),
      answer["rank_loss_noticed"]["longest_ms"].get<double>(),
      answer["first_hit_after_restart"]["mean_ms"].get<double>(), answer["takeovers"].get<std::uint64_t>(),
      answer["pages_kept"].get<std::uint64_t>(), answer["pages_not_kept"].get<std::uint64_t>());
  return answer;
}

}  // namespace hicache::bench
