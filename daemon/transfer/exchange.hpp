// Loads that a TP group does together, because its ranks hold the same bytes: who takes part, how far the
// parts are, and when a rank's layers may be announced. Knows nothing of CUDA: the GPUs' transfer threads
// copy.
//
// A rank's load first gathers: it waits a bounded time for the loads of the other ranks. Either all of them
// agree, at one moment, or all load directly. After the agreement nobody goes back: a part that fails fails
// the load of every rank. Parts never wait for each other; only what they report is put together. A load ends
// when all parts have ended, for all ranks at once: until then a copy of another rank's part may still land
// in its pages.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "daemon/transfer/doorbell.hpp"
#include "daemon/transfer/exchange_plan.hpp"
#include "daemon/transfer/exchange_policy.hpp"
#include "daemon/transfer/transfer_job.hpp"

namespace hicache::daemon {

// Why ranks loaded directly although an exchange was wanted.
enum class GoDirect : std::uint8_t {
  late,             // a rank did not post in time
  unreachable,      // a GPU cannot write into another one's memory
  different_pages,  // the ranks' loads are not of the same host pages
  ended,            // a rank's load was cancelled or its rank died before the others had posted
  count_
};
const char* name_of(GoDirect cause);

struct ExchangeStatus {
  MlaLoad mode = MlaLoad::automatic;
  std::string off_because;                                                         // not empty: never tried
  std::uint64_t exchanged = 0;                                                     // loads of a group
  std::uint64_t failed = 0;                                                        // of them
  std::array<std::uint64_t, static_cast<std::size_t>(GoDirect::count_)> direct{};  // by cause
};

// One load of a group. Thread-safe; methods that take a rank are called by the thread that has its part.
class Exchange {
 public:
  enum class State : std::uint8_t { gathering, agreed, given_up };

  [[nodiscard]] State state() const { return state_.load(std::memory_order_acquire); }  // SYNC agreed

  // --- After the agreement.
  // What the rank's GPU does. Once for each rank.
  ExchangePart take_part(std::uint32_t rank) { return std::move(members_[rank].part); }
  // Where the pages of another rank's load lie.
  [[nodiscard]] const RankMemory& memory(std::uint32_t rank) const { return *members_[rank].memory; }
  // Whether any rank waits for layers.
  [[nodiscard]] bool announces_layers() const { return announces_; }
  // Everything that the rank's part has to copy of layers below `layers` has landed, on all ranks. Announces
  // what has landed from all parts.
  void landed(std::uint32_t rank, std::uint32_t layers);
  // Ok until a part has failed; then every part should end soon.
  [[nodiscard]] Status verdict() const { return verdict_.load(std::memory_order_acquire); }
  // The first failure counts.
  void fail(Status status);
  // No copy of the rank's part is left. The last part ends the load for every rank and gets what the sink is
  // to be told.
  std::vector<TransferDone> part_ended(std::uint32_t rank, TransferJobPtr job);

 private:
  friend class ExchangeTable;
  struct Member {
    // Alive until the load has ended: held by the job, which is the thread's own or in `ended`.
    const RankMemory* memory = nullptr;
    LayerFences* fences = nullptr;  // null when the rank does not wait for layers
    std::uint32_t fence_value = 0;
    std::uint32_t slot = 0;
    std::vector<PagePair> pages;
    std::shared_ptr<Doorbell> bell;
    bool joined = false;
    ExchangePart part;
    std::uint32_t landed_layers = 0;
    TransferJobPtr ended;
  };
  explicit Exchange(const GroupLoad& load) : load_(load), members_(load.ranks) {}
  [[nodiscard]] bool matches(const GroupLoad& load, std::size_t count) const;
  void ring_all();

  const GroupLoad load_;
  std::size_t count_ = 0;  // pages
  std::uint64_t opened_ns_ = 0;
  std::uint32_t joined_ = 0;  // guarded by the table's mutex
  bool announces_ = false;
  // SYNC agreed: the table stores agreed with release after the last member has joined and the parts are
  // planned; threads load it with acquire before they use them.
  std::atomic<State> state_{State::gathering};
  std::atomic<Status> verdict_{Status::ok};

  std::mutex mutex_;                // of what follows and the members' progress
  std::uint32_t ready_layers_ = 0;  // announced
  std::uint32_t ended_parts_ = 0;
  std::vector<Member> members_;  // by tp rank
};

// Brings the loads of a group together. Thread-safe; outlives every exchange.
class ExchangeTable {
 public:
  explicit ExchangeTable(ExchangePolicy policy, std::string off_because)
      : policy_(policy), off_because_(std::move(off_because)) {}

  // Whether a load should wait for its group.
  [[nodiscard]] bool wants(const Transfer& transfer) const;
  [[nodiscard]] std::uint64_t patience_ns(const Transfer& transfer) const;
  // Adds a rank's load to its group's. Null when the others have been told already that they load directly.
  // `bell` is rung when something changes for the rank. Precondition: wants(transfer), and no earlier load of
  // the rank's producer slot waits or is exchanged: the slot's words are raised in order.
  std::shared_ptr<Exchange> join(const Transfer& transfer, std::shared_ptr<Doorbell> bell);
  // The rank will not wait any longer. False when the group has agreed meanwhile.
  bool give_up(Exchange& exchange, GoDirect cause);
  // For a rank that has seen its exchange given up, before it loads directly.
  static void leave(const Transfer& transfer);
  // Counts the end of an exchange.
  void count_end(Status status);

  [[nodiscard]] ExchangeStatus status() const;

 private:
  std::shared_ptr<Exchange> find_or_open(const Transfer& transfer);
  void note_joined(const std::shared_ptr<Exchange>& exchange);
  void end_gathering(Exchange& exchange, GoDirect cause);
  void agree(Exchange& exchange);

  const ExchangePolicy policy_;
  const std::string off_because_;
  mutable std::mutex mutex_;
  std::list<std::shared_ptr<Exchange>> gathering_;  // oldest first; given up ones until all ranks know it
  std::array<std::uint64_t, static_cast<std::size_t>(GoDirect::count_)> direct_{};
  std::uint64_t exchanged_ = 0;
  std::uint64_t failed_ = 0;
};

}  // namespace hicache::daemon
