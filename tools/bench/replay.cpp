#include "tools/bench/replay.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>

#include "shm/clock.hpp"
#include "tools/bench/bench_model.hpp"
#include "tools/bench/controller_worker.hpp"
#include "tools/bench/progress.hpp"
#include "tools/bench/rank_worker.hpp"
#include "tools/bench/shared_object.hpp"
#include "tools/bench/tree_replay.hpp"
#include "tools/bench/workload.hpp"

namespace hicache::bench {
namespace {

constexpr std::uint32_t kAttachTimeoutMs = 60'000;
constexpr std::uint32_t kEndTimeoutMs = 60'000;
constexpr std::uint64_t kDumpCheckNs = 2'000'000'000;

class Replay {
 public:
  Replay(const ReplayOptions& options, ReplayPlan plan, const Workload& workload, DaemonProcess& daemon,
         SharedObject<Board>& board)
      : options_(options),
        plan_(std::move(plan)),
        workload_(workload),
        daemon_(daemon),
        board_(board),
        result_(std::make_unique<ReplayResult>()) {}

  Result<std::unique_ptr<ReplayResult>> run() {
    auto before = daemon_.counters();
    if (!before) return before.error();
    if (const Outcome started = start_ranks(); !started) return started.error();
    const std::uint64_t start = monotonic_ns();
    board_->started.store(1, std::memory_order_release);
    board_->announce();
    watch();
    const std::uint64_t end = monotonic_ns();
    result_->seconds = static_cast<double>(end - start) / 1e9;
    end_ranks();
    check_dump("after");
    if (const auto after = daemon_.counters()) {
      take_counters(*before, *after);
    } else {
      fault("the daemon's counters can't be read: {}", after.error().message);
    }
    for (const GroupPlan& group : plan_.groups) take_group(group);
    cross_check();
    if (options_.controller && !board_->aborted()) {
      auto policies = compare_policies(workload_);
      if (!policies) return policies.error();
      result_->policies = std::move(*policies);
    }
    return std::move(result_);
  }

 private:
  template <class... Args>
  void fault(fmt::format_string<Args...> format, Args&&... args) {
    result_->faults.push_back(fmt::format(format, std::forward<Args>(args)...));
  }

  Outcome start_ranks() {
    for (const GroupPlan& group : plan_.groups) {
      for (std::uint32_t rank = 0; rank < group.spec.tp_size; ++rank) {
        auto process = ChildProcess::fork_worker(fmt::format("bench-rank-{}", rank), [&, rank] {
          return (plan_.controller ? run_controller_rank : run_rank)(plan_, group, rank, workload_, *board_);
        });
        if (!process) return process.error();
        processes_.push_back(std::move(*process));
      }
    }
    const std::uint64_t end = monotonic_ns() + std::uint64_t{kAttachTimeoutMs} * 1'000'000;
    while (count(RankPhase::ready) < plan_.ranks()) {
      if (interrupted() || board_->aborted() || monotonic_ns() > end || a_rank_died()) {
        board_->give_up();
        std::string why = first_message();
        if (why.empty()) why = fmt::format("{} of {} ranks attached", count(RankPhase::ready), plan_.ranks());
        return Error{Status::peer_lost, why, 0};
      }
      const std::uint32_t seen = board_->turn.load(std::memory_order_seq_cst);
      if (count(RankPhase::ready) < plan_.ranks()) board_->sleep(seen, 20);
    }
    return success();
  }

  // Until every rank has finished or the run was given up.
  void watch() {
    ProgressLine line;
    std::uint64_t next_check = monotonic_ns() + kDumpCheckNs;
    while (count(RankPhase::finished) < plan_.ranks() && !board_->aborted()) {
      ::usleep(20'000);
      if (interrupted()) {
        result_->interrupted = true;
        board_->give_up();
      }
      if (a_rank_died()) board_->give_up();
      if (monotonic_ns() > next_check) {
        check_dump("during");
        next_check = monotonic_ns() + kDumpCheckNs;
      }
      line.show(progress_text());
    }
    line.finish();
  }

  [[nodiscard]] std::string progress_text() const {
    std::uint64_t done = ~0ull;
    std::uint64_t pages = 0;
    std::uint64_t hits = 0;
    std::uint64_t written = 0;
    std::uint64_t errors = 0;
    std::uint64_t bytes = 0;
    for (const GroupPlan& group : plan_.groups) {
      for (std::uint32_t rank = 0; rank < group.spec.tp_size; ++rank) {
        const RankBoard& board = board_->ranks[group.first_board + rank];
        done = std::min(done, board.done.load(std::memory_order_relaxed));
        const RankCounts& counts = board.counts;
        errors += counts.verify_errors.load(std::memory_order_relaxed);
        bytes += counts.bytes_written.load(std::memory_order_relaxed) +
                 counts.bytes_loaded.load(std::memory_order_relaxed);
        if (rank != 0) continue;
        pages += counts.pages.load(std::memory_order_relaxed);
        hits += counts.hits.load(std::memory_order_relaxed);
        written += counts.written.load(std::memory_order_relaxed);
      }
    }
    // Fits a terminal of 80 columns: a longer line can't be drawn over.
    return fmt::format(
        "{} of {} requests, {} pages written, hits {:.1f} %, {:.1f} GB, {} errors", done, workload_.size(),
        written, 100.0 * static_cast<double>(hits) / static_cast<double>(std::max<std::uint64_t>(pages, 1)),
        static_cast<double>(bytes) / 1e9, errors);
  }

  [[nodiscard]] std::uint32_t count(RankPhase phase) const {
    std::uint32_t n = 0;
    for (std::uint32_t i = 0; i < plan_.ranks(); ++i) {
      if (board_->ranks[i].phase.load(std::memory_order_acquire) == phase) ++n;
    }
    return n;
  }
  // A rank that ended without saying so was killed.
  bool a_rank_died() {
    for (std::size_t i = 0; i < processes_.size(); ++i) {
      if (const auto status = processes_[i].wait(0); status && *status != 0) {
        board_->ranks[i].fail(fmt::format("rank process {} exited with status {}", i, *status));
        return true;
      }
    }
    return false;
  }
  [[nodiscard]] std::string first_message() const {
    for (std::uint32_t i = 0; i < plan_.ranks(); ++i) {
      if (board_->ranks[i].message[0] != '\0') return board_->ranks[i].message.data();
    }
    return {};
  }

  void end_ranks() {
    for (std::size_t i = 0; i < processes_.size(); ++i) {
      const auto status = processes_[i].wait(kEndTimeoutMs);
      if (!status) fault("rank {}: {}", i, status.error().message);
      const RankBoard& board = board_->ranks[i];
      if (board.message[0] != '\0') fault("rank {}: {}", i, board.message.data());
    }
  }

  void check_dump(const char* when) {
    if (!options_.dump_check) return;
    const auto program = sibling_program("hicache-dump");
    if (!program) return fault("--dump-check: {}", program.error().message);
    const auto output = CapturedOutput::create();
    if (!output) return fault("--dump-check: {}", output.error().message);
    auto dump = ChildProcess::start({{*program, daemon_.name(), "--check"}, output->fd(), -1});
    if (!dump) return fault("--dump-check: {}", dump.error().message);
    const auto status = dump->wait(kEndTimeoutMs);
    ++result_->dump_checks;
    if (!status || *status != 0) {
      fault("hicache-dump --check {} the run: {}\n{}", when,
            status ? fmt::format("exit status {}", *status) : status.error().message, output->tail());
    }
  }

  void take_counters(const DaemonCounters& before, const DaemonCounters& after) {
    const auto gauge = [](const std::string& name) {
      return name.ends_with("_pages") || name.ends_with("_leases") || name.ends_with("_pool_bytes") ||
             name.ends_with("_segments") || name.ends_with("_clients");
    };
    for (const auto& [name, value] : after) {
      const auto old = before.find(name);
      // fenced_clients and lost_clients count events although they are named like gauges.
      const bool is_gauge = gauge(name) && name != "fenced_clients" && name != "lost_clients";
      result_->daemon[name] = is_gauge || old == before.end() ? value : value - old->second;
    }
  }

  void take_group(const GroupPlan& group) {
    GroupTotals totals;
    totals.engine = group.engine;
    totals.attention = group.spec.attention;
    totals.page_bytes = group.spec.shard_bytes();
    totals.slot_bytes = group.spec.slot_bytes();
    const RankCounts& first = board_->ranks[group.first_board].counts;
    struct Shared {
      const char* name;
      std::atomic<std::uint64_t> RankCounts::*field;
      std::uint64_t* total;
    };
    const std::array<Shared, 9> shared{{{"requests", &RankCounts::requests, &totals.requests},
                                        {"pages", &RankCounts::pages, &totals.pages},
                                        {"hits", &RankCounts::hits, &totals.hits},
                                        {"fetched", &RankCounts::fetched, &totals.fetched},
                                        {"full_hits", &RankCounts::full_hits, &totals.full_hits},
                                        {"written", &RankCounts::written, &totals.written},
                                        {"present", &RankCounts::present, &totals.present},
                                        {"filling", &RankCounts::filling, &totals.filling},
                                        {"dropped", &RankCounts::dropped, &totals.dropped}}};
    for (const Shared& item : shared) *item.total = (first.*item.field).load(std::memory_order_relaxed);

    double write_ns = 0;
    double load_ns = 0;
    for (std::uint32_t rank = 0; rank < group.spec.tp_size; ++rank) {
      const RankBoard& board = board_->ranks[group.first_board + rank];
      for (const Shared& item : shared) {
        const std::uint64_t theirs = (board.counts.*item.field).load(std::memory_order_relaxed);
        if (theirs != *item.total && !board_->aborted()) {
          fault("engine {}: rank 0 counts {} {}, rank {} counts {}", group.engine, *item.total, item.name,
                rank, theirs);
        }
      }
      totals.bytes_written += board.counts.bytes_written.load(std::memory_order_relaxed);
      totals.bytes_loaded += board.counts.bytes_loaded.load(std::memory_order_relaxed);
      totals.verified_words += board.counts.verified_words.load(std::memory_order_relaxed);
      totals.verify_errors += board.counts.verify_errors.load(std::memory_order_relaxed);
      totals.failed_operations += board.counts.failed_operations.load(std::memory_order_relaxed);
      totals.probe_differences += board.counts.probe_differences.load(std::memory_order_relaxed);
      write_ns += static_cast<double>(board.write_busy_ns);
      load_ns += static_cast<double>(board.load_busy_ns);
      for (std::size_t i = 0; i < kTimedCount; ++i) result_->latency[i].merge(board.latency[i]);
    }
    const double ranks = group.spec.tp_size;
    if (write_ns > 0) totals.write_gbps = static_cast<double>(totals.bytes_written) * ranks / write_ns;
    if (load_ns > 0) totals.load_gbps = static_cast<double>(totals.bytes_loaded) * ranks / load_ns;

    judge(group, totals);
    result_->groups.push_back(std::move(totals));
  }

  void judge(const GroupPlan& group, const GroupTotals& totals) {
    if (totals.verify_errors > 0)
      fault("engine {}: {} words came back wrong", group.engine, totals.verify_errors);
    if (totals.failed_operations > 0)
      fault("engine {}: {} operations failed", group.engine, totals.failed_operations);
    if (board_->aborted()) return;  // the sums below hold for whole runs
    const std::uint64_t loaded = totals.hits * group.spec.shard_bytes() * group.spec.tp_size;
    if (totals.bytes_loaded != loaded || totals.verified_words * 8 != loaded) {
      fault("engine {}: {} bytes loaded and {} checked, expected {}", group.engine, totals.bytes_loaded,
            totals.verified_words * 8, loaded);
    }
    const std::uint64_t stored = totals.written * group.spec.shard_bytes() * group.spec.shards();
    if (totals.dropped == 0 && !options_.tree_decides() && totals.bytes_written != stored) {
      fault("engine {}: {} bytes written, expected {}", group.engine, totals.bytes_written, stored);
    }
  }

  // What the ranks counted and what the daemon counted must agree, unless others use the daemon too.
  void cross_check() {
    if (options_.attach || board_->aborted()) return;
    const auto compare = [&](const char* name, auto field) {
      std::uint64_t sum = 0;
      for (const GroupTotals& group : result_->groups) sum += std::invoke(field, group);
      const auto at = result_->daemon.find(name);
      const std::uint64_t counted = at == result_->daemon.end() ? 0 : at->second;
      if (sum != counted) fault("the ranks count {} {}, the daemon counts {}", sum, name, counted);
    };
    if (!options_.controller) {  // which asks for a request's pages once to load and once to write
      compare("reserves", &GroupTotals::requests);
      compare("pages_requested", &GroupTotals::pages);
      compare("hits", &GroupTotals::pool_hits);
      compare("prefetched", &GroupTotals::fetched);
      compare("full_hits", &GroupTotals::full_hits);
    }
    if (!options_.tree_decides()) compare("written", &GroupTotals::written);
    compare("dropped", &GroupTotals::dropped);
    compare("bytes_written", &GroupTotals::bytes_written);
    compare("bytes_loaded", &GroupTotals::bytes_loaded);
    if (options_.controller && options_.pool_pages > 0 && result_->groups.size() == 1) compare_with_tree();
  }

  // Through a daemon and on the tree alone, the same policy must find the same.
  void compare_with_tree() {
    const auto alone = replay_on_tree(workload_, options_.pool_pages, options_.policy);
    const std::uint64_t hits = result_->groups.front().hits;
    if (!alone) return fault("on the tree alone: {}", alone.error().message);
    if (*alone != hits) fault("{} hits, but the tree alone finds {}", hits, *alone);
  }

  const ReplayOptions& options_;
  ReplayPlan plan_;
  const Workload& workload_;
  DaemonProcess& daemon_;
  SharedObject<Board>& board_;
  std::unique_ptr<ReplayResult> result_;
  std::vector<ChildProcess> processes_;
};

Result<ReplayPlan> make_plan(const ReplayOptions& options) {
  ReplayPlan plan;
  plan.concurrency = options.concurrency;
  plan.device = options.device;
  plan.gpus = options.gpus;
  plan.io_backend = options.io_backend;
  plan.controller = options.controller;
  plan.storage = !options.storage.empty();
  plan.storage_sync = options.storage_sync;
  plan.policy = options.policy;
  const std::uint64_t usual = options.pool_pages > 0 ? kSmallPageBytes : kDefaultPageBytes;
  const std::uint64_t page_bytes = options.page_bytes > 0 ? options.page_bytes : usual;
  std::uint32_t first_board = 0;
  for (std::size_t i = 0; i < options.engines.size(); ++i) {
    // The tree counts tokens; a page of one keeps its lists as short as the daemon's.
    auto spec =
        make_spec(options.engines[i], options.ranks, page_bytes, options.controller ? 1 : kPageTokens);
    if (!spec) return spec.error();
    plan.groups.push_back({fmt::format("bench-{}-{}", ::getpid(), i), std::move(*spec), first_board});
    first_board += options.ranks;
  }
  if (first_board > Board::kMaxRanks) {
    return Error{Status::invalid_argument,
                 fmt::format("{} engines of {} ranks: expected at most {} ranks in all",
                             options.engines.size(), options.ranks, Board::kMaxRanks),
                 0};
  }
  return plan;
}

Result<BlockRequests> read_requests(const ReplayOptions& options) {
  if (!options.trace.empty()) return read_trace_file(options.trace, options.limit);
  ConversationOptions conversations = options.conversations;
  if (options.limit > 0) conversations.requests = options.limit;
  return generate_conversations(conversations);
}

}  // namespace

nlohmann::json config_with_pool(nlohmann::json config, const NamespaceSpec& spec, std::uint32_t pages) {
  constexpr std::uint64_t kSlackSegments = 4;  // so that segments never limit the pages
  const std::uint64_t slot = spec.slot_bytes();
  const std::uint64_t segment = std::max(4 * kMiB, std::bit_ceil(slot));
  const std::uint64_t slots = segment / slot;
  config["pool"]["segment_bytes"] = segment;
  config["pool"]["bytes"] = segment * ((pages + slots - 1) / slots + kSlackSegments);
  config["pool"]["max_pages"] = pages;
  config["eviction"]["high_watermark"] = 0;
  config["eviction"]["low_watermark"] = 0;
  return config;
}

nlohmann::json config_with_storage(nlohmann::json config, const ReplayOptions& options) {
  nlohmann::json& storage = config["storage"];
  storage["backend"] = options.storage;
  if (!options.storage_dir.empty()) {
    storage[options.storage]["directories"] = {std::filesystem::absolute(options.storage_dir).string()};
  }
  storage["prefetch_policy"] = "wait_complete";
  storage["prefetch_threshold_tokens"] = 0;
  storage["prefetch_capacity"] = 1.0;
  storage["backup_policy"] = "write_through";
  storage["backup_queue_pages"] = 1u << 20;
  return config;
}

Result<std::unique_ptr<ReplayResult>> run_replay(const ReplayOptions& options) {
  auto config = read_config_json(options.config);
  if (!config) return config.error();
  auto plan = make_plan(options);
  if (!plan) return plan.error();
  auto blocks = read_requests(options);
  if (!blocks) return blocks.error();
  const Workload workload = Workload::from_blocks(*blocks, kPageTokens);
  if (workload.size() == 0) return Error{Status::invalid_argument, "the workload has no request", 0};
  if (options.pool_pages > 0) {
    const std::uint32_t pages =
        options.tree_decides() ? static_cast<std::uint32_t>(workload.distinct_pages()) : options.pool_pages;
    *config = config_with_pool(*config, plan->groups.front().spec, pages);
  }
  if (!options.storage.empty()) *config = config_with_storage(*config, options);
  if (options.io_backend == IoBackend::kernel) {
    for (const GroupPlan& group : plan->groups) (*config)["pool"]["map_engines"].push_back(group.engine);
  }
  auto board = SharedObject<Board>::create();
  if (!board) return board.error();
  auto daemon = options.attach ? DaemonProcess::attach(*config) : DaemonProcess::start(*config);
  if (!daemon) return daemon.error();
  plan->socket_path = (*daemon)->socket_path();
  // As many handles as the pool has pages; without a bound on these, more than it can have.
  constexpr std::uint64_t kMostHandles = 1u << 20;
  plan->host_tokens = options.pool_pages > 0 ? options.pool_pages : kMostHandles;

  auto result = Replay(options, std::move(*plan), workload, **daemon, *board).run();
  if (!result) return result;
  if (const Outcome stopped = (*daemon)->stop(); !stopped) {
    (*result)->faults.push_back(stopped.error().message);
  }
  return result;
}

}  // namespace hicache::bench
