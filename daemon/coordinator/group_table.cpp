#include "daemon/coordinator/group_table.hpp"

#include <algorithm>

namespace hicache::daemon {
namespace {
constexpr auto kRelaxed = std::memory_order_relaxed;
}

SequenceWindow::Found SequenceWindow::look_up(std::uint64_t sequence) const {
  const Slot& slot = slots_[sequence % kGroupSequenceWindow];
  if (slot.sequence == sequence) return {slot.lease ? Verdict::joined : Verdict::ended, slot.lease};
  if (slot.sequence > sequence) return {Verdict::too_old, LeaseId{}};
  // The slot's last sequence is a whole window older. If its lease lives, the caller must wait for it.
  return {Verdict::fresh, slot.lease};
}

void SequenceWindow::open(std::uint64_t sequence, LeaseId lease) {
  slots_[sequence % kGroupSequenceWindow] = Slot{sequence, lease, false};
}

void SequenceWindow::end(std::uint64_t sequence, bool loads_failed) {
  Slot& slot = slots_[sequence % kGroupSequenceWindow];
  if (slot.sequence != sequence) return;
  slot.lease = LeaseId{};
  slot.loads_failed = loads_failed;
}

SequenceWindow::Progress SequenceWindow::progress(std::uint64_t from) const {
  Progress at{from, false};
  while (!at.failed && slot(at.sequence + 1).sequence == at.sequence + 1 && !slot(at.sequence + 1).lease) {
    ++at.sequence;
    at.failed = slot(at.sequence).loads_failed;
  }
  return at;
}

Result<SequenceWindow::Progress> AgreementWindow::agree(std::uint64_t number, std::uint64_t rank_bit,
                                                        std::uint64_t all_ranks,
                                                        const SequenceWindow& sequences) {
  Slot& slot = slots_[number % kAgreementWindow];
  if (slot.number > number) return Error{Status::stale_generation, "", 0};
  if (slot.number < number) {
    if (slot.number != 0 && slot.asked != all_ranks) return Error{Status::again, "", 0};
    last_ = sequences.progress(last_.sequence);
    slot = Slot{number, 0, last_};
  }
  if ((slot.asked & rank_bit) != 0) return Error{Status::exists, "", 0};
  slot.asked |= rank_bit;
  return slot.answer;
}

bool Group::empty() const {
  return !scheduler && std::all_of(members.begin(), members.end(), [](ClientSlot m) { return m.is_none(); });
}

GroupTable::GroupTable(std::span<GroupEntry> entries, NamespaceTable& namespaces)
    : entries_(entries), namespaces_(namespaces), groups_(entries.size()) {
  for (std::uint32_t i = 0; i < entries_.size(); ++i) {
    GroupEntry& e = entries_[i];
    groups_[i].slot = GroupSlot{i};
    groups_[i].generation = Generation{e.generation.load(kRelaxed)};
    e.state.store(static_cast<std::uint32_t>(GroupState::free), kRelaxed);
    e.scheduler.store(kNone32, kRelaxed);
    e.namespace_id.store(kNone32, kRelaxed);
    e.members_attached.store(0, kRelaxed);
    e.leases.store(0, kRelaxed);
  }
}

Group* GroupTable::find_or_create(const std::string& engine, const PrefixHash& base_digest,
                                  std::uint64_t spec_epoch, NamespaceId ns, std::uint32_t tp_size,
                                  bool read_only) {
  Group* free_group = nullptr;
  for (Group& group : groups_) {
    if (group.state == GroupState::free && free_group == nullptr) free_group = &group;
    if (group.state == GroupState::active && group.engine == engine && group.base_digest == base_digest &&
        group.spec_epoch == spec_epoch && group.read_only == read_only) {
      return &group;
    }
  }
  if (free_group == nullptr) return nullptr;
  Group& group = *free_group;
  group.generation = Generation{group.generation.value + 1 == 0 ? 1 : group.generation.value + 1};
  group.engine = engine;
  group.base_digest = base_digest;
  group.spec_epoch = spec_epoch;
  group.namespace_id = ns;
  namespaces_.hold(ns);
  group.tp_size = tp_size;
  group.read_only = read_only;
  group.members.assign(tp_size, ClientSlot::none());
  group.scheduler = ClientSlot::none();
  group.node = NumaNode::none();
  group.leases = 0;
  group.sequences = {};
  group.agreements = {};
  group.state = GroupState::active;
  GroupEntry& e = entries_[group.slot.value];
  e.generation.store(group.generation.value, kRelaxed);
  e.namespace_id.store(ns.value, kRelaxed);
  e.tp_size.store(tp_size, kRelaxed);
  e.leases.store(0, kRelaxed);
  e.operations.store(0, kRelaxed);
  e.divergences.store(0, kRelaxed);
  store_text(e.engine, engine);
  store_members(group);
  e.state.store(static_cast<std::uint32_t>(GroupState::active), kRelaxed);
  return &group;
}

void GroupTable::store_members(const Group& group) {
  std::uint64_t mask = 0;
  for (std::size_t i = 0; i < group.members.size(); ++i) {
    if (group.members[i]) mask |= 1ull << i;
  }
  entries_[group.slot.value].members_attached.store(mask, kRelaxed);
  entries_[group.slot.value].scheduler.store(group.scheduler.value, kRelaxed);
}

Status GroupTable::join(Group& group, Role role, std::uint32_t tp_rank, ClientSlot client) {
  ClientSlot& place = role == Role::scheduler ? group.scheduler : group.members[tp_rank];
  if (place) return Status::exists;
  place = client;
  store_members(group);
  return Status::ok;
}

void GroupTable::leave(Group& group, ClientSlot client) {
  for (ClientSlot& member : group.members) {
    if (member == client) member = ClientSlot::none();
  }
  if (group.scheduler == client) group.scheduler = ClientSlot::none();
  store_members(group);
}

void GroupTable::break_up(Group& group) {
  group.state = GroupState::broken;
  entries_[group.slot.value].state.store(static_cast<std::uint32_t>(GroupState::broken), kRelaxed);
}

void GroupTable::set_namespace(Group& group, NamespaceId ns) {
  namespaces_.hold(ns);
  namespaces_.drop(group.namespace_id);
  group.namespace_id = ns;
  entries_[group.slot.value].namespace_id.store(ns.value, kRelaxed);
}

void GroupTable::change_leases(Group& group, int by) {
  group.leases = static_cast<std::uint32_t>(static_cast<int>(group.leases) + by);
  entries_[group.slot.value].leases.store(group.leases, kRelaxed);
}

void GroupTable::collect(Group& group) {
  if (group.state == GroupState::free || !group.empty() || group.leases != 0) return;
  namespaces_.drop(group.namespace_id);
  group.state = GroupState::free;
  GroupEntry& e = entries_[group.slot.value];
  e.state.store(static_cast<std::uint32_t>(GroupState::free), kRelaxed);
  e.namespace_id.store(kNone32, kRelaxed);
  e.members_attached.store(0, kRelaxed);
  e.scheduler.store(kNone32, kRelaxed);
}

}  // namespace hicache::daemon
