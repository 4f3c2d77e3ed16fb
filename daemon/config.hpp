// The daemon's configuration: every key, its default, its range, and whether SIGHUP may change it.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "daemon/transfer/exchange_policy.hpp"
#include "daemon/transfer/schedule.hpp"
#include "shm/protocol.hpp"
#include "shm/status.hpp"
#include "shm/waiting.hpp"

namespace hicache::daemon {

enum class EvictionPolicyName { lru, lfu };
enum class CudaMode { off, on_demand, at_start };
enum class HugePages { off, prefer, require };
enum class NumaPlacement { off, spread };
// storage: of pages that go to storage or come from it.
enum class ChecksumPolicy { off, storage, sampled, always };
enum class VerifyPolicy { off, lazy, full };
// Which pages go to storage, and when: none; each as soon as it is ready; each once it has been used often
// enough; those that background eviction is about to take.
enum class BackupPolicy { none, write_through, write_through_selective, write_back };
// What becomes of a dirty page whose room is needed at once.
enum class DirtyEviction { drop, write_back };

// Segments of a pool whose configuration does not say: large enough that their ends cut few copies and leave
// little room unused, and many enough that page sizes can share the pool.
[[nodiscard]] std::uint64_t default_segment_bytes(std::uint64_t pool_bytes);

// Sizes may be written as numbers of bytes or as text with a unit: "64KiB", "512MiB", "200GiB". Keys marked
// (reload) may change with SIGHUP; a reload that changes another key is refused as a whole and names it.
struct Config {
  std::string name = "default";  // names the shared memory objects and the default socket

  struct Socket {
    std::string path;                                // "" = default_socket_path(name)
    std::vector<std::uint32_t> allowed_uids;         // besides root and the daemon's own user (reload)
    std::vector<std::uint32_t> read_only_uids;       // likewise, but never to change anything (reload)
    std::uint32_t max_connections = 256;             // further ones are refused at once (reload)
    std::uint32_t max_connections_per_process = 64;  // of them (reload)
  } socket;

  struct Pool {
    std::uint64_t bytes = 1ull << 30;           // reserved at start
    std::uint64_t memory_reserve = 1ull << 30;  // what must be left of the memory then, for everybody else
    std::uint64_t segment_bytes = 4ull << 20;   // power of two from 64 KiB to 1 GiB; default_segment_bytes()
    std::uint32_t max_pages = 0;            // logical pages at most; 0 = pool.bytes / 16 KiB, at most 4 Mi
    HugePages huge_pages = HugePages::off;  // of the pool, when it is made
    NumaPlacement numa =
        NumaPlacement::spread;  // of the pool's memory over the machine's nodes, when it is made
    // Who may map the pool and move pages itself (io_backend kernel): engines of these names, whose processes
    // run as root, as the daemon's own user, or as one of these users. They can write to every page.
    std::vector<std::string> map_engines;  // none = nobody (reload)
    std::vector<std::uint32_t> map_uids;   // (reload)
  } pool;

  struct Region {
    bool keep_on_exit = false;            // leave the shared memory objects behind for inspection
    std::uint32_t flight_records = 4096;  // power of two
  } region;

  struct Eviction {
    EvictionPolicyName policy = EvictionPolicyName::lru;
    // Background eviction starts above high and stops at low, as fractions of max_pages and of pool.bytes.
    // high_watermark 0 = off.
    double high_watermark = 0.95;  // (reload)
    double low_watermark = 0.90;   // (reload)
  } eviction;

  struct Integrity {
    ChecksumPolicy checksums = ChecksumPolicy::off;  // which shards get one when they are written
    // When they are compared. lazy: before each load; full: also all of them when a region is taken over.
    VerifyPolicy verify = VerifyPolicy::lazy;
  } integrity;

  WaitPolicy waiting{0, 1000, 50};         // the coordinator's ladder (reload)
  WaitPolicy client_waiting{0, 1000, 50};  // what clients are told at attach (reload)

  struct TransferConfig {
    std::uint32_t threads = 1;                          // of the host backend, 1 to 64
    TransferMethod method = TransferMethod::automatic;  // of GPUs
    std::uint32_t streams = 1;          // of a rank in each direction, for direct copies, 1 to 8
    std::uint32_t block_quota = 2;      // blocks of a gather or scatter kernel in a rank, 1 to 256
    std::uint32_t staging_blocks = 64;  // of a kernel that packs or unpacks pages in a rank, 1 to 256
  } transfer;

  struct Cuda {
    // When contexts are made and the pool is pinned: with the first rank that has GPU memory, or at the start
    // for every GPU that is visible.
    CudaMode mode = CudaMode::on_demand;
  } cuda;

  // Pages that all ranks of a group hold alike (MLA), where the group's ranks are on several GPUs.
  struct Mla {
    // direct: every GPU loads all pages over its own link. exchange: each loads its share and passes it on to
    // the others. auto: exchange where it saves time.
    MlaLoad load = MlaLoad::automatic;
    std::uint32_t wait_us = 5'000;  // how long a rank's load waits for the other ranks' at most
  } mla;

  struct Storage {
    std::string backend;  // attached at the start; "" = none
    // Settings of each backend, by its name; what they may hold is the backend's matter.
    std::map<std::string, nlohmann::ordered_json> settings;

    std::uint32_t prefetch_threshold_tokens = 256;             // shorter ones do not begin (reload)
    PrefetchPolicy prefetch_policy = PrefetchPolicy::timeout;  // of prefetches that name none (reload)
    std::uint32_t prefetch_timeout_base_ms = 2000;             // (reload)
    std::uint32_t prefetch_timeout_per_ki_token_ms = 100;      // per 1024 tokens that storage has (reload)
    std::uint32_t prefetch_timeout_max_ms = 30'000;            // 0 = no bound (reload)
    double prefetch_capacity = 0.5;  // share of the pool that prefetches in flight may hold (reload)

    BackupPolicy backup_policy = BackupPolicy::write_through;  // (reload)
    std::uint32_t backup_uses = 2;                       // write_through_selective: from this use on (reload)
    std::uint32_t backup_queue_pages = 4096;             // that wait; further ones are dropped (reload)
    DirtyEviction dirty_eviction = DirtyEviction::drop;  // (reload)

    std::uint32_t read_batches = 8;           // in flight at the backend (reload)
    std::uint32_t write_batches = 2;          // (reload)
    std::uint32_t batch_deadline_ms = 5000;   // after which its pages count as timed out (reload)
    std::uint32_t breaker_failures = 3;       // batches in a row until nothing is sent; 0 = never (reload)
    std::uint32_t breaker_suspend_ms = 5000;  // until the backend is probed (reload)
  } storage;

  struct Limits {
    std::uint32_t clients = 64;             // attached ranks and schedulers, at most 1024
    std::uint32_t namespaces = 64;          // at most 4096
    std::uint32_t leases = 4096;            // in all, at most 1 Mi
    std::uint32_t leases_per_group = 1024;  // (reload)
    // Of one client: operations that have not ended, and bytes of the lists in its arena that they name, each
    // as often as it is named (0 = arena_bytes).
    std::uint32_t operations_per_client = 512;  // (reload)
    std::uint64_t arena_in_flight_bytes = 0;    // (reload)
    // Part of the pool that the attached TP groups can be sure to pin, split evenly; the rest is for who asks
    // first.
    double guaranteed_share = 0.5;                 // (reload)
    std::uint32_t submission_entries = 256;        // of each client's ring, power of two
    std::uint32_t completion_entries = 1024;       // power of two, at least twice submission_entries
    std::uint64_t arena_bytes = 4ull << 20;        // of each client, for hash and page lists
    std::uint32_t operation_deadline_ms = 30'000;  // default of operations that name none (reload)
    std::uint32_t max_deadline_ms = 600'000;       // longer ones are cut to this (reload)
    std::uint32_t hello_deadline_ms = 5'000;       // connections without a Hello are closed (reload)
  } limits;

  struct Log {
    std::string level = "info";  // trace, debug, info, warn, error (reload)
    std::string file;            // "" = standard error
  } log;

  [[nodiscard]] std::uint32_t page_table_entries() const;
};

// Reads a configuration from JSON text. Unknown keys, wrong types and values out of range are refused; the
// message names the key's path, what was found and what was expected, and lists every fault, not only the
// first.
Result<Config> parse_config(const std::string& json_text);
Result<Config> load_config(const std::string& path);
// The whole configuration as JSON, every key present.
std::string config_to_json(const Config& config);
// Takes the (reload) keys of `next` into `current`. invalid_argument naming the keys when others differ.
Outcome apply_reload(Config& current, const Config& next);

}  // namespace hicache::daemon
