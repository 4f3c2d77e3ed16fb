// HiCacheController: what an engine's scheduler puts in the place of SGLang's, with a daemon doing the work.
//
// One controller a rank, on the rank's session. All ranks of a group make the same calls in the same order;
// each operation takes the group's next sequence, the daemon decides it once, and its end is told to all
// ranks at the same agreement (docs/controller.md). So every rank sees the same acks at the same call of
// check_events, with no collective between the ranks.
//
// Host slots are handles: numbers of this engine for pages of the daemon's pool (host_page_states.hpp). The
// daemon alone evicts from the pool; evict_host and reset only end this engine's interest.
//
// Thread safety: none; the scheduler's thread. layer_counter().wait_until may run on another one. Blocking:
// calls that need a decision (write, hold, load, start_loading with several loads) wait for the daemon's
// answer, microseconds; finish_writes, drain and reset wait for copies, which end by their deadlines. Nothing
// waits longer than answer_timeout_ms. Errors: values. When the session is lost or the daemon does not answer
// in time, that error comes from every call until reset() and a new controller.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "hicache/client.hpp"
#include "hicache/controller/host_page_states.hpp"
#include "hicache/controller/layer_events.hpp"
#include "hicache/controller/state_slots.hpp"
#include "hicache/controller/tree_tier.hpp"
#include "hicache/export.h"
#include "hicache/token_slots.hpp"

namespace hicache {

struct ControllerOptions {
  NamespaceSpec spec;                        // as the session attached with it
  std::uint64_t host_tokens = 0;             // handles: see size_host_pool
  std::uint32_t deadline_ms = 0;             // of operations; 0 = the daemon's default
  std::uint32_t answer_timeout_ms = 30'000;  // after which the daemon counts as not answering
  StateSlots* states = nullptr;              // needed for trailing pools; must outlive the controller
  // How many writes may wait at a time for the ack that tells what storage keeps of them; 0: none is asked
  // for, and backups cost this rank nothing. The same on all ranks.
  std::uint32_t backup_acks = 0;
};

// How a prefetch stands.
struct PrefetchProgress {
  bool ended = true;              // the request may run; also for a request without a prefetch
  std::vector<PrefixHash> ready;  // once it has ended: leading pages that the pool has, for PrefixTree::adopt
  std::uint64_t fetched_tokens = 0;  // of those, how many came from storage
};

class HICACHE_EXPORT HiCacheController : public TreeTier {
 public:
  // Session (attached, buffers registered) and device slots must outlive the controller. Device slot s lies
  // in device page s / page_tokens. A session serves one controller in its life, and nothing else.
  static Result<std::unique_ptr<HiCacheController>> create(Session& session, TokenSlots& device,
                                                           const ControllerOptions& options);
  ~HiCacheController() override;
  HiCacheController(const HiCacheController&) = delete;
  HiCacheController& operator=(const HiCacheController&) = delete;

  // --- device to host
  // Writes read device memory only after this fence, until another is set. Nothing: at once.
  void set_start_fence(std::optional<WriteFence> fence) { start_fence_ = fence; }
  // Queues a copy of whole pages and starts it; the host slots. `chain`: hashes from the prefix's first page
  // to the last one written. no_space when there are too few handles.
  Result<std::vector<std::uint64_t>> write(std::span<const std::uint64_t> device_slots,
                                           std::span<const PrefixHash> chain, std::int64_t node_id,
                                           std::optional<std::int64_t> priority);
  Result<std::vector<std::uint64_t>> write(std::span<const std::uint64_t> device_slots,
                                           std::span<const PrefixHash> chain, std::int64_t node_id) override {
    return write(device_slots, chain, node_id, std::nullopt);
  }
  // Starts what is queued, in order; nothing happens when nothing is.
  Outcome start_writing();
  Result<std::vector<HiCacheAck>> finish_writes() override;

  // --- host to device
  Result<HostHold> hold(std::span<const std::uint64_t> host_slots) override;
  void let_go(const HostHold& hold) override;
  Result<std::vector<std::uint64_t>> adopt(std::span<const PrefixHash> pages) override;
  Result<std::vector<std::uint64_t>> load(const HostHold& hold, std::span<const std::uint64_t> host_slots,
                                          std::int64_t node_id) override;
  // Hold and load in one: takes device slots, nothing moves before start_loading. no_space when the device
  // has no room, not_found when the pool does not have all pages any more.
  Result<std::vector<std::uint64_t>> load(std::span<const std::uint64_t> host_slots,
                                          std::optional<std::int64_t> priority = std::nullopt,
                                          std::int64_t node_id = kNoNode);
  // Starts everything queued as one batch; its producer index, or -1 when nothing was queued. The index is
  // the consumer of the forward pass that needs the batch. Waits while all three slots are loading.
  Result<std::int32_t> start_loading();
  [[nodiscard]] LayerDoneCounter& layer_counter() { return counter_; }

  // --- storage
  // Begins to fetch from storage what the pool does not have of a request's pages, as much as storage has and
  // the daemon's limits allow. `chain`: hashes from the prefix's first page. The daemon decides, once for the
  // group; a policy other than the daemon's may be named. It takes no part in the order of the other
  // operations: no ack waits for it. exists when the request has one already.
  Outcome prefetch(const std::string& request, std::span<const PrefixHash> chain,
                   std::optional<PrefetchPolicy> policy = std::nullopt);
  // Once per scheduling step and waiting request, on every rank: may it run? The answer is the same on all
  // ranks. Once it is yes, the prefetch is forgotten here, and its pages are cached pages like others: adopt
  // them before they are evicted.
  Result<PrefetchProgress> check_prefetch_progress(const std::string& request);
  // Ends it with what has come by now.
  Result<PrefetchProgress> terminate_prefetch(const std::string& request);
  // The request will not run: ends its prefetch, if it has one.
  Outcome release_aborted_request(const std::string& request);
  [[nodiscard]] std::size_t ongoing_prefetches() const { return prefetches_.size(); }
  // With ControllerOptions::backup_acks: the acks of backups that have ended since the last call, one for
  // each write, in the order in which they ended. `host_tokens` is what storage holds of it, not always its
  // leading tokens; `status` ok when that is all, dropped when it is not, again when too many were waiting
  // already, else why it is not known. They come when storage has answered: every rank gets the same ones,
  // but not at the same call, so that no decision may depend on when. When the daemon is lost, each that is
  // still open comes once with daemon_lost before the call returns the error.
  Result<std::vector<HiCacheAck>> take_backup_acks();
  [[nodiscard]] std::size_t open_backups() const { return backups_.size(); }

  // --- ends
  // Once per scheduling step, on every rank: the acks of what has ended for the whole group. Does not wait
  // for other ranks. An end may be told one call late, on all ranks alike.
  Result<std::vector<HiCacheAck>> check_events();
  // Waits until everything in flight has ended; its acks. Loads that were queued stay queued.
  Result<std::vector<HiCacheAck>> drain();

  // --- eviction
  // Frees device slots. With host slots: they must be synced, and become the only copy.
  Outcome evict_device(std::span<const std::uint64_t> device_slots,
                       std::span<const std::uint64_t> host_slots) override;
  Outcome evict_host(std::span<const std::uint64_t> host_slots) override;
  [[nodiscard]] std::uint64_t host_available() const override { return host_->available(); }
  // Tokens given up. invalid_argument unless backup_only, and for pages that are not backup.
  Result<std::uint64_t> evict_host(std::span<const std::uint64_t> host_slots, bool backup_only);
  Outcome revive(std::span<const std::uint64_t> host_slots) override;

  // Ends everything in flight first, then forgets device slots, host handles or both. What is left of a page
  // is the only copy this engine knows. Works on a lost session too, where both go. busy when a copy may
  // still run: nothing was cleared then. The tree forgets the same: PrefixTree::reset.
  Outcome reset(ResetTiers tiers = ResetTiers::both);
  [[nodiscard]] std::uint64_t epoch() const { return epoch_; }

  [[nodiscard]] const HostPageStates& host_pages() const { return *host_; }
  [[nodiscard]] std::size_t in_flight() const { return in_flight_.size(); }
  [[nodiscard]] std::size_t queued_loads() const { return queued_loads_.size(); }
  // Why the controller has failed, or ok.
  [[nodiscard]] Status state() const { return failure_ ? failure_->status : Status::ok; }

 private:
  struct QueuedWrite {
    CacheOperationPtr operation;
    std::vector<PrefixHash> chain;
    std::vector<DevicePage> pages;
    std::vector<DevicePage> states;  // one for each page, or empty
  };
  struct QueuedLoad {
    CacheOperationPtr operation;
    std::uint64_t sequence = 0;  // of its hold
    DevicePage state;            // where the states of its last page go
  };
  // A sequence of the group that this rank has not seen the end of.
  struct InFlight {
    std::uint64_t sequence = 0;
    LeaseId lease;
    CacheOperationPtr operation;  // none: a hold that was let go or merged
    Ticket copy;
    Ticket release;
    std::optional<WriteFence> start;
    std::optional<LayerFence> finish;
    Status refused = Status::ok;     // why there is no copy
    std::vector<DevicePage> states;  // load: one for each page, or empty
  };
  // What the daemon found of a list of pages.
  struct Found {
    std::uint32_t hits = 0;     // leading ones that are pinned and can be loaded
    std::uint32_t present = 0;  // leading ones that are there
  };

  struct Prefetching {
    LeaseId lease;
    Ticket ticket;
    std::uint32_t questions = 0;
    std::vector<PrefixHash> chain;
  };

  // Acks of backups that wait for take_backup_acks; an engine that does not take them loses further ones.
  static constexpr std::size_t kMaxUntakenAcks = 65536;

  // A write whose backup was asked about.
  struct BackingUp {
    Ticket ticket;
    HiCacheAck ack;
    bool forgotten = false;  // of an epoch before a reset: nobody gets it
  };

  HiCacheController(Session& session, TokenSlots& device, const ControllerOptions& options,
                    std::unique_ptr<HostPageStates> host);

  // controller_backups.cpp
  void ask_about_backup(const InFlight& flight, std::uint32_t first, std::uint32_t count);
  void forget_backups();

  // controller_prefetch.cpp
  Result<PrefetchProgress> ask_about(const std::string& request, bool end);
  void end_prefetches();

  // controller.cpp
  Result<std::vector<DevicePage>> device_pages(std::span<const std::uint64_t> slots) const;
  Outcome start_write(QueuedWrite queued);
  void start_load(InFlight& flight, LayerFence fence);
  [[nodiscard]] std::vector<DevicePage> states_of(const std::vector<QueuedLoad>& queue) const;
  InFlight* find(std::uint64_t sequence);

  // controller_progress.cpp
  Error fail(Error error);
  void route(OperationResult result);
  Outcome wait_for_news();
  Result<Ticket> post(const std::function<Result<Ticket>()>& post_one);
  Result<OperationResult> result_of(Ticket ticket);
  InFlight& open_flight();
  Status open_lease(InFlight& flight, std::span<const PrefixHash> hashes, Found& found,
                    SequenceOrder order = SequenceOrder::agreed);
  void release(InFlight& flight);
  Outcome agree(std::vector<HiCacheAck>& acks);
  Outcome agree_until(std::uint64_t sequence, std::vector<HiCacheAck>& acks);
  Outcome retire(InFlight& flight, bool load_failed, std::vector<HiCacheAck>& acks);
  Outcome end_without_daemon();

  Session& session_;
  TokenSlots& device_;
  ControllerOptions options_;
  std::unique_ptr<HostPageStates> host_;
  SessionLayerWords words_;
  LayerDoneCounter counter_;
  std::optional<WriteFence> start_fence_;
  std::vector<QueuedWrite> queued_writes_;
  std::vector<QueuedLoad> queued_loads_;
  std::deque<InFlight> in_flight_;                              // by sequence
  std::unordered_map<std::uint64_t, OperationResult> results_;  // read, not asked for yet
  std::unordered_set<std::uint64_t> busy_;                      // ended tickets whose pages a copy may touch
  std::map<std::string, Prefetching> prefetches_;               // by request
  std::deque<BackingUp> backups_;                               // by sequence
  std::vector<HiCacheAck> backup_acks_;                         // ended, not taken
  std::uint64_t prefetch_sequence_ = 0;                         // of the order apart
  std::uint64_t next_sequence_ = 1;
  std::uint64_t agreement_ = 0;
  Ticket agreement_ticket_;
  std::uint64_t epoch_ = 0;
  std::optional<Error> failure_;
};

}  // namespace hicache
