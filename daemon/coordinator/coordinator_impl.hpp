// The coordinator's inside. One class, one thread; its methods are in files by what they decide:
//   coordinator.cpp  the serving loop, sleeping and waking, completions
//   operations.cpp   what a submission must look like; nop, reserve, load, release
//   writes.cpp       group writes: allocation, publication in prefix order, failure
//   membership.cpp   attach, device buffers, loss of a client
//   deadlines.cpp    ends of operations whose time is up
//   control.cpp      hicache-ctl
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "daemon/coordinator/client_table.hpp"
#include "daemon/coordinator/coordinator.hpp"
#include "daemon/coordinator/deadline_queue.hpp"
#include "daemon/coordinator/group_table.hpp"
#include "daemon/coordinator/group_write.hpp"
#include "daemon/coordinator/inbox.hpp"
#include "daemon/coordinator/lease_table.hpp"
#include "daemon/coordinator/namespace_table.hpp"
#include "daemon/coordinator/page_table.hpp"
#include "daemon/coordinator/stats.hpp"
#include "daemon/eviction/policy.hpp"
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
  void execute_reserve(Client& client, const Submission& submission, std::uint64_t sequence);
  void execute_load(Client& client, const Submission& submission, std::uint64_t sequence);
  [[nodiscard]] std::optional<GroupLoad> group_load(const Client& client, const Lease& lease,
                                                    const Submission& submission);
  void execute_release(Client& client, const Submission& submission, std::uint64_t sequence);
  void execute_agree(Client& client, const Submission& submission, std::uint64_t sequence);
  void answer(Client& client, const Submission& submission, std::uint64_t sequence, Status status);
  Result<Lease*> lease_for(const Client& client, LeaseId id);
  void poison(Lease& lease);
  void try_close(Lease& lease);
  void close_finished_leases();
  void finish_load(const TransferDone& done, TransferOwner& owner);
  void quarantine(PageId page);
  [[nodiscard]] std::uint64_t deadline_of(const Submission& submission) const;
  // Copies a list of device pages out of the arena, once. False when one is not among the rank's pages.
  bool read_device_pages(const Client& client, const Submission& submission,
                         std::vector<DevicePage>& out) const;

  // --- writes.cpp
  void execute_write(Client& client, const Submission& submission, std::uint64_t sequence);
  GroupWrite& decide_write(Lease& lease, const Submission& submission);
  void start_rank_copy(Client& client, Lease& lease, GroupWrite& write, const Submission& submission,
                       std::span<const DevicePage> device_pages);
  void finish_rank_copy(const TransferDone& done, const TransferOwner& owner);
  void publish_from(PageId page);
  void give_up(PageId page);
  void resolve(PageId page, Status status);
  void end_write(GroupWrite& write, Status status);
  void end_write_if_resolved(GroupWrite& write);
  void answer_participant(GroupWrite& write, WriteParticipant& rank);
  void release_aborted(GroupWrite& write);

  // --- membership.cpp
  void attach(AttachRequest& request);
  void buffers(BuffersRequest& request);
  void gone(const GoneRequest& request);
  void lose(Client& client, bool orderly);
  void remove_if_drained(Client& client);
  void fence(Client& client);
  void move_clients(const Group& group, NamespaceId ns);

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
  // Who is filling a page: the write and the position in it.
  struct Filler {
    GroupWrite* write = nullptr;
    std::uint32_t position = 0;
  };
  std::vector<Filler> fillers;  // by page
  DeadlineQueue deadlines;
  std::vector<ClientSlot> new_completions;
  std::vector<LeaseId> maybe_finished;  // a write of theirs ended on behalf of another lease
  std::size_t next_client = 0;          // fairness: where the next turn starts
  bool evicting_in_background = false;
  std::vector<CoordinatorRequest> taken;  // reused
  std::vector<PageId> scratch_pages;
  std::vector<DevicePage> scratch_device_pages;
  std::vector<PrefixHash> scratch_hashes;

  std::atomic<bool> stopping{false};
  std::atomic<std::uint64_t> stop_deadline_ns{0};
};

}  // namespace hicache::daemon
