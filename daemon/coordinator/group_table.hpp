// TP groups: who belongs together, and which lease a group's sequence stands for.
//
// Thread safety: none; the coordinator's own.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "daemon/coordinator/namespace_table.hpp"
#include "shm/namespace_spec.hpp"
#include "shm/protocol.hpp"
#include "shm/region.hpp"
#include "shm/status.hpp"

namespace hicache::daemon {

// Remembers for each recent sequence of a group which lease it opened, also after that lease has ended.
class SequenceWindow {
 public:
  enum class Verdict { fresh, joined, ended, too_old };
  struct Found {
    Verdict verdict = Verdict::fresh;
    LeaseId lease;
  };
  [[nodiscard]] Found look_up(std::uint64_t sequence) const;
  // Precondition: look_up said fresh.
  void open(std::uint64_t sequence, LeaseId lease);
  void end(std::uint64_t sequence, bool loads_failed);

  // How far the group may go on: past every sequence that has ended, counted from 1 without a gap, but not
  // beyond the first one with a failed load after `from`.
  struct Progress {
    std::uint64_t sequence = 0;
    bool failed = false;
  };
  [[nodiscard]] Progress progress(std::uint64_t from) const;

 private:
  struct Slot {
    std::uint64_t sequence = 0;
    LeaseId lease;  // none = ended
    bool loads_failed = false;
  };
  [[nodiscard]] const Slot& slot(std::uint64_t sequence) const {
    return slots_[sequence % kGroupSequenceWindow];
  }
  std::vector<Slot> slots_ = std::vector<Slot>(kGroupSequenceWindow);
};

// The agreements of a group: the first rank that asks for one decides it, the others get the same answer, and
// nobody waits for anybody.
class AgreementWindow {
 public:
  // Answer to agreement `number` for a rank. again while a rank has not asked for the one that many before
  // it; stale_generation for an older number, exists when this rank has asked for it already.
  Result<SequenceWindow::Progress> agree(std::uint64_t number, std::uint64_t rank_bit,
                                         std::uint64_t all_ranks, const SequenceWindow& sequences);

 private:
  struct Slot {
    std::uint64_t number = 0;
    std::uint64_t asked = 0;  // by rank
    SequenceWindow::Progress answer;
  };
  std::vector<Slot> slots_ = std::vector<Slot>(kAgreementWindow);
  SequenceWindow::Progress last_;
};

struct Group {
  GroupSlot slot;
  Generation generation;
  GroupState state = GroupState::free;
  std::string engine;
  PrefixHash base_digest;        // of the namespace: survives a bump of the weights epoch
  std::uint64_t spec_epoch = 0;  // weights epoch the engine asked for
  NamespaceId namespace_id;      // new leases use it; changes with a bump
  std::uint32_t tp_size = 1;
  bool read_only = false;           // of users who may only read: they never share a group with others
  std::vector<ClientSlot> members;  // by tp rank, none = not attached
  ClientSlot scheduler;
  NumaNode node;  // of all the members' devices; none = of several, or not known
  std::uint32_t leases = 0;
  // Of the ranks, of the scheduler, and of the ranks' sequences apart, for which no agreement waits.
  std::array<SequenceWindow, 3> sequences;
  AgreementWindow agreements;  // of the ranks

  [[nodiscard]] std::uint64_t all_ranks() const { return tp_size == 64 ? ~0ull : (1ull << tp_size) - 1; }
  [[nodiscard]] bool empty() const;
};

class GroupTable {
 public:
  GroupTable(std::span<GroupEntry> entries, NamespaceTable& namespaces);

  // The active group of this engine and namespace, made when there is none. nullptr when the table is full.
  Group* find_or_create(const std::string& engine, const PrefixHash& base_digest, std::uint64_t spec_epoch,
                        NamespaceId ns, std::uint32_t tp_size, bool read_only);
  [[nodiscard]] Group& get(GroupSlot slot) { return groups_[slot.value]; }
  // Puts a client in its place; exists when the place is taken.
  Status join(Group& group, Role role, std::uint32_t tp_rank, ClientSlot client);
  void leave(Group& group, ClientSlot client);
  void break_up(Group& group);
  void set_namespace(Group& group, NamespaceId ns);
  void change_leases(Group& group, int by);
  [[nodiscard]] GroupEntry& entry(const Group& group) { return entries_[group.slot.value]; }
  // Frees the group when it has neither members nor leases.
  void collect(Group& group);

  template <class Visit>
  void for_each(Visit&& visit) {
    for (Group& group : groups_) {
      if (group.state != GroupState::free) visit(group);
    }
  }

 private:
  void store_members(const Group& group);
  std::span<GroupEntry> entries_;
  NamespaceTable& namespaces_;
  std::vector<Group> groups_;
};

}  // namespace hicache::daemon
