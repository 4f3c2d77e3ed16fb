// The coordinator's inside. One class, one thread; its methods are in files by what they decide:
//   coordinator.cpp  the serving loop, sleeping and waking, completions
//   operations.cpp   what a submission must look like; nop, reserve, load, release
//   admission.cpp    what a client's role and quotas allow
//   writes.cpp       group writes: allocation, publication in prefix order, failure
//   membership.cpp   attach, device buffers, loss of a client
//   pool_mappers.cpp ranks that map the pool, and pages that an earlier daemon leased to such ranks
//   deadlines.cpp    ends of operations whose time is up
//   control.cpp      hicache-ctl
//   prefetches.cpp   pages that come from storage
//   backups.cpp      pages that go to storage
//   backup_asks.cpp  engines that want to know what became of that
//   storage_events.cpp   what storage answers, and hicache-ctl storage
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "daemon/coordinator/backup.hpp"
#include "daemon/coordinator/backup_ask.hpp"
#include "daemon/coordinator/client_table.hpp"
#include "daemon/coordinator/coordinator.hpp"
#include "daemon/coordinator/deadline_queue.hpp"
#include "daemon/coordinator/group_table.hpp"
#include "daemon/coordinator/group_write.hpp"
#include "daemon/coordinator/inbox.hpp"
#include "daemon/coordinator/lease_table.hpp"
#include "daemon/coordinator/namespace_table.hpp"
#include "daemon/coordinator/page_table.hpp"
#include "daemon/coordinator/prefetch.hpp"
#include "daemon/coordinator/stats.hpp"
#include "daemon/eviction/policy.hpp"
#include "daemon/storage/storage_tier.hpp"
#include "shm/flight_recorder.hpp"

namespace hicache::daemon {

// A load in flight.
struct PendingLoad {
  LeaseId lease;
  ClientSlot client;
  Generation client_generation;
  std::uint64_t user_data = 0;
  std::uint64_t operation_sequence = 0;
  bool answered = false;
  bool owes_pages = false;
};

// What a transfer in flight belongs to: a load of its own, or one rank's part of a group write.
struct TransferOwner {
  PendingLoad load;
  std::uint64_t write_number = 0;  // 0 = a load
  std::uint32_t tp_rank = 0;
  std::size_t first = 0;  // of a write: [first, end) of the rank's positions
  std::size_t end = 0;
};

// A request to storage that has not ended.
struct StorageWork {
  StorageOperation operation = StorageOperation::exists;
  NamespaceId ns;             // held
  std::uint64_t number = 0;   // of the prefetch that asks or the backup that writes; 0 = nobody any more
  std::vector<PageId> pages;  // get, put
  std::vector<bool> told;     // by page: get, put: its buffers are free again; exists: it is there
};

struct Coordinator::Impl {
  explicit Impl(const CoordinatorOptions& options);
  void finish_takeover();

  // --- coordinator.cpp
  void run();
  // One turn over everything that may wait: requests, rings, deadlines. False when there was nothing to do.
  bool turn();
  bool serve_inbox();
  bool serve_clients();
  std::uint32_t serve(Client& client);
  void sleep_until_kicked();
  [[nodiscard]] bool work_waiting();
  void handle(CoordinatorRequest& request);
  void complete(Client& client, const Completion& completion);
  void kick_waiting_clients();
  bool evict_in_background();
  void note(FlightEvent event, const Client* client, Opcode opcode, Status status, std::uint64_t lease,
            std::uint64_t user_data, std::uint32_t count);
  [[nodiscard]] bool drained() const;

  // --- operations.cpp
  void execute(Client& client, const Submission& submission);
  Status check(const Client& client, const Submission& submission) const;
  // Whether the client's role and quotas allow it now; takes its list into account until it ends.
  Status admit(Client& client, const Submission& submission, std::uint64_t sequence);
  void execute_reserve(Client& client, const Submission& submission, std::uint64_t sequence);
  void execute_load(Client& client, const Submission& submission, std::uint64_t sequence);
  [[nodiscard]] std::optional<GroupLoad> group_load(const Client& client, const Lease& lease,
                                                    const Submission& submission);
  void execute_release(Client& client, const Submission& submission, std::uint64_t sequence);
  void note_refusals(Client& client);
  void execute_agree(Client& client, const Submission& submission, std::uint64_t sequence);
  void answer(Client& client, const Submission& submission, std::uint64_t sequence, Status status);
  Result<Lease*> lease_for(const Client& client, LeaseId id);
  void poison(Lease& lease);
  void try_close(Lease& lease);
  // Bytes of the pool that the group may still pin, so that others find the room they are guaranteed.
  [[nodiscard]] std::uint64_t pin_room(const Group& group);
  // Takes what a pin will cost out of that room; false, counted, when it does not fit. A page that is pinned
  // already costs nothing.
  bool take_room(std::uint64_t& room, std::uint64_t cost);
  bool take_room(std::uint64_t& room, PageId page) {
    return take_room(room, pages.word(page).pins == 0 ? pages.pin_cost(page) : 0);
  }
  void close_finished_leases();
  void finish_load(const TransferDone& done, TransferOwner& owner);
  void quarantine(PageId page);
  [[nodiscard]] std::uint64_t deadline_of(const Submission& submission) const;
  // Copies the lists of device pages and, where they are named, of state slots out of the arena, once. False
  // when one is not among the rank's.
  bool read_device_pages(const Client& client, const Submission& submission);

  // --- writes.cpp
  void execute_write(Client& client, const Submission& submission, std::uint64_t sequence);
  GroupWrite& open_write(Lease& lease, const Submission& submission);
  [[nodiscard]] WriteDecision begin_decision(const Lease& lease, const Submission& submission);
  // Decides the pages [first, end) of the submission's.
  void decide_pages(Lease& lease, const Submission& submission, std::uint32_t first, std::uint32_t end,
                    GroupWrite& write, WriteDecision& decision);
  // Starts the rank's copy of those of them that it is to write.
  void start_rank_copy(Client& client, const Submission& submission, std::uint32_t first, std::uint32_t end,
                       GroupWrite& write);
  void finish_rank_copy(const TransferDone& done, const TransferOwner& owner);
  void publish_from(PageId page);
  void give_up(PageId page);
  void resolve(PageId page, Status status);
  void end_write(GroupWrite& write, Status status);
  void end_write_if_resolved(GroupWrite& write);
  void answer_participant(GroupWrite& write, WriteParticipant& rank);
  void release_aborted(GroupWrite& write);

  // --- membership.cpp
  Result<NamespaceId> namespace_for(const NamespaceSpec& spec, bool may_evict);
  void attach(AttachRequest& request);
  void buffers(BuffersRequest& request);
  [[nodiscard]] NumaNode node_of(const Group& group);
  void gone(const GoneRequest& request);
  void lose(Client& client, bool orderly);
  void remove_if_drained(Client& client);
  void fence(Client& client);
  void move_clients(const Group& group, NamespaceId ns);

  // --- pool_mappers.cpp
  // What marks pages that are leased to this client for writing.
  [[nodiscard]] std::uint64_t pool_tag_of(const Client& client) const;
  void breach(const BreachRequest& request);
  void mapper_gone(ClientSlot slot);

  // --- prefetches.cpp
  void execute_prefetch(Client& client, const Submission& submission, std::uint64_t sequence);
  void execute_check_prefetch(Client& client, const Submission& submission, std::uint64_t sequence);
  void decide_prefetch(Lease& lease, const Submission& submission);
  void query_storage(Prefetch& prefetch);
  void take_query_answer(Prefetch& prefetch, std::size_t found);
  void begin_fetching(Prefetch& prefetch);
  void send_fetches(Prefetch& prefetch, std::span<const PageId> pages_to_read);
  void wait_for_page(Prefetch& prefetch, Lease& lease, std::uint32_t position, PageId page);
  // Tells those who wait for a page that it is ready or lost. A lost one is not pinned by them afterwards.
  void tell_waiting(PageId page, bool ready, bool from_storage);
  void end_prefetch(Prefetch& prefetch, Status status);
  void end_finished_prefetches();
  void answer_participants(Prefetch& prefetch);
  void answer_all(std::vector<WaitingRank>& ranks, Completion c);
  void expire_prefetch(const Deadline& due);
  Prefetch* find_prefetch(std::uint64_t number);

  // --- backups.cpp
  [[nodiscard]] bool backs_up(BackupPolicy by) const;
  [[nodiscard]] bool still_there(const BackupPage& one) const;
  void add_candidate(PageId page, std::uint32_t owner);
  void drop_backup(const BackupPage& one, Counter why);
  void offer_backup(PageId page, GroupSlot group);
  void offer_used_pages(const Lease& lease);
  bool write_back(PageId page, EvictReason why);
  void start_backups();
  void queue_candidates();
  void send_next_batch(BackupOperation& operation);
  void end_backup(std::uint64_t number, Counter why_not_the_rest);
  void drop_waiting_backups(Counter why);

  // --- backup_asks.cpp
  void execute_backup(Client& client, const Submission& submission, std::uint64_t sequence);
  std::shared_ptr<BackupAsk> decide_backup(Lease& lease, const Submission& submission);
  [[nodiscard]] bool asked_about(PageId page) const;
  void tell_asking(PageId page, Generation generation, bool kept);
  void end_backup_ask(BackupAsk& ask, Status status);
  void answer_participants(BackupAsk& ask);
  void expire_backup_ask(std::uint64_t number);
  void end_backup_asks(GroupSlot group);

  // --- storage_events.cpp
  void take_storage_events();
  void count_batch(StorageOperation operation, std::uint64_t us);
  void take_page_event(StorageWork& work, std::uint32_t index, Status status);
  void take_late_event(StorageWork& work);
  void take_ended_event(const StorageWork& work);
  void storage_changed();
  void control_storage(ControlRequest& request);
  [[nodiscard]] nlohmann::json storage_status() const;
  std::uint64_t send_to_storage(StorageOperation operation, NamespaceId ns, std::uint32_t owner,
                                std::vector<PrefixHash> hashes, StorageWork work);
  std::shared_ptr<const StorageNamespace> storage_namespace(NamespaceId ns);
  [[nodiscard]] bool storage_attached() const {
    return storage != nullptr && storage->state() == StorageState::attached;
  }

  // --- deadlines.cpp
  // The operation is in flight already.
  void set_deadline(const Deadline& deadline);
  void expire(std::uint64_t now_ns);
  void expire_load(std::uint64_t transfer);

  // --- control.cpp
  void control(ControlRequest& request);
  std::uint32_t evict_pages(std::uint32_t count);
  std::uint32_t evict_namespace(NamespaceId ns);
  void reload(const Config& config);

  [[nodiscard]] CommitScope commit() { return CommitScope(tables.header->commit_sequence, commit_depth); }

  Config config;
  const std::uint32_t write_block;
  Tables tables;
  std::uint64_t pool_bytes;
  std::unique_ptr<EvictionPolicy> policy;
  std::unique_ptr<PageSurvey> survey;  // of a takeover; gone once everything has been rebuilt
  Stats stats;
  PageTable pages;
  NamespaceTable namespaces;
  LeaseTable leases;
  GroupTable groups;
  ClientTable clients;
  FlightRecorder recorder;
  Inbox inbox;
  Transfers* transfers = nullptr;
  const CudaPath* cuda = nullptr;
  UniqueFd epoll;

  std::uint32_t commit_depth = 0;
  std::uint64_t operation_sequence = 0;
  std::uint64_t record_sequence = 0;
  std::uint64_t now_ns = 0;
  std::uint64_t next_number = 0;  // of transfers and writes
  std::unordered_map<std::uint64_t, TransferOwner> transfers_in_flight;
  std::unordered_map<std::uint64_t, GroupWrite*> writes_in_flight;
  // Who is filling a page: the write and the position in it, or storage.
  struct Filler {
    GroupWrite* write = nullptr;
    std::uint32_t position = 0;
    bool storage = false;
    bool reading = false;  // storage has not told how its read ended: it may still write to the slot
  };
  std::vector<Filler> fillers;  // by page
  DeadlineQueue deadlines;
  std::vector<ClientSlot> new_completions;
  std::vector<LeaseId> maybe_finished;  // a write of theirs ended on behalf of another lease
  std::size_t next_client = 0;          // fairness: where the next turn starts
  bool evicting_in_background = false;
  std::vector<HeldPage> held;  // nobody's until the processes that they are leased to have ended
  StorageTier* storage = nullptr;
  std::unordered_map<std::uint64_t, StorageWork> storage_work;           // by request
  std::unordered_map<std::uint64_t, Prefetch*> prefetches_in_flight;     // by number
  std::unordered_map<std::uint32_t, std::vector<PrefetchWait>> waiting;  // by page that is being filled
  std::vector<std::uint64_t> maybe_complete;                             // prefetches that a page was told to
  std::uint64_t prefetching_bytes = 0;
  Backups backups;
  BackupAsks backup_asks;
  std::vector<std::function<void(Status, std::string)>> backup_waiters;  // of `storage sync`
  std::unordered_map<std::uint32_t, std::shared_ptr<const StorageNamespace>> storage_namespaces;
  std::vector<StorageEvent> storage_events;  // reused

  std::vector<CoordinatorRequest> taken;  // reused
  std::vector<PageId> scratch_pages;
  std::vector<PageId> scratch_publish;
  std::vector<DevicePage> scratch_device_pages;
  std::vector<DevicePage> scratch_states;  // as many; none where the submission names no state slot
  std::vector<PrefixHash> scratch_hashes;

  std::atomic<bool> stopping{false};
  std::atomic<std::uint64_t> stop_deadline_ns{0};
};

}  // namespace hicache::daemon
