// Replays requests through a daemon with whole TP groups of rank processes, and checks every byte that comes
// back.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "libhicache/include/hicache/io_backend.hpp"
#include "shm/device_geometry.hpp"
#include "shm/namespace_spec.hpp"
#include "shm/status.hpp"
#include "tools/bench/conversations.hpp"
#include "tools/bench/daemon_process.hpp"
#include "tools/bench/latency_histogram.hpp"
#include "tools/bench/policy_rates.hpp"
#include "tools/bench/scoreboard.hpp"

namespace hicache::bench {

struct ReplayOptions {
  std::string config;                    // the daemon's configuration file
  std::string trace;                     // "" = generated conversations
  ConversationOptions conversations;     // when there is no trace
  std::uint64_t limit = 0;               // requests at most; 0 = all of the trace, or conversations.requests
  std::vector<Attention> engines;        // one TP group each
  std::uint32_t ranks = 4;               // of each group
  std::uint32_t concurrency = 1;         // requests of a group in work at once
  std::uint32_t pool_pages = 0;          // > 0: exactly that many logical pages, no watermarks
  std::uint64_t page_bytes = 0;          // of a shard; 0 = small with pool_pages, else default
  DeviceKind device = DeviceKind::host;  // where the ranks' pages lie
  std::uint32_t gpus = 1;                // the ranks of a group take them in turn
  IoBackend io_backend = IoBackend::direct;  // kernel: a daemon that is started lets the engines map the pool
  bool attach = false;                       // use the daemon that runs already
  bool controller = false;              // through HiCacheController and PrefixTree, one request at a time
  TreePolicy policy = TreePolicy::lru;  // controller: the tree's; with pool_pages the tree alone decides then
  std::string storage;                  // backend below the pool; "" = none
  std::string storage_dir;              // where it keeps its files
  bool storage_sync = false;            // the next request waits until the last one's pages are backed up
  bool dump_check = false;              // run `hicache-dump --check` during and after the replay

  // The daemon's pool is lru in a replay. Any other policy is the tree's alone: the pool has room for all
  // pages, there are as many handles as pages were asked for, and what the tree writes again may be there.
  [[nodiscard]] bool tree_decides() const { return controller && policy != TreePolicy::lru; }
};

// What one group did. Counts of pages are those of its rank 0, which the other ranks must agree with; bytes,
// words and errors are sums over the ranks.
struct GroupTotals {
  std::string engine;
  Attention attention = Attention::mha;
  std::uint64_t requests = 0;
  std::uint64_t pages = 0;
  std::uint64_t hits = 0;     // in the pool or in storage
  std::uint64_t fetched = 0;  // of those, from storage
  std::uint64_t full_hits = 0;
  std::uint64_t written = 0;
  std::uint64_t present = 0;
  std::uint64_t filling = 0;
  std::uint64_t dropped = 0;
  std::uint64_t bytes_written = 0;
  std::uint64_t bytes_loaded = 0;
  std::uint64_t verified_words = 0;
  std::uint64_t verify_errors = 0;
  std::uint64_t failed_operations = 0;
  std::uint64_t probe_differences = 0;
  // Bytes of all ranks over the mean time that a rank had such an operation in flight, in 10^9 bytes a
  // second.
  double write_gbps = 0;
  double load_gbps = 0;
  std::uint64_t page_bytes = 0;  // of a shard
  std::uint64_t slot_bytes = 0;  // pool memory of one page, all shards

  [[nodiscard]] std::uint64_t pool_hits() const { return hits - fetched; }
};

struct ReplayResult {
  std::vector<GroupTotals> groups;
  double seconds = 0;
  DaemonCounters daemon;  // growth during the run; gauges as they were at its end
  std::array<LatencyHistogram, kTimedCount> latency;
  std::uint32_t dump_checks = 0;
  std::vector<PolicyRow> policies;  // controller: what each policy finds of this workload
  std::vector<std::string> faults;  // everything that must not be, as sentences; empty = success
  bool interrupted = false;

  [[nodiscard]] bool success() const { return faults.empty() && !interrupted; }
};

// Runs it. An error means that it could not begin; what went wrong later is in `faults`.
Result<std::unique_ptr<ReplayResult>> run_replay(const ReplayOptions& options);

// The daemon configuration with this storage backend and nothing that keeps a page from going there or coming
// back.
nlohmann::json config_with_storage(nlohmann::json config, const ReplayOptions& options);

// The daemon configuration with a pool of exactly `pages` logical pages of this namespace, and no watermarks.
nlohmann::json config_with_pool(nlohmann::json config, const NamespaceSpec& spec, std::uint32_t pages);

}  // namespace hicache::bench
