// What a submission must look like, and the operations that end at once or belong to one rank.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <array>
#include <cassert>
#include <cstring>
#include <new>

#include "daemon/coordinator/coordinator_impl.hpp"
#include "shm/crash_points.hpp"
#include "shm/prefix_hash.hpp"

namespace hicache::daemon {
namespace {

constexpr std::uint64_t holder_bit(const Client& client) {
  return client.role == Role::scheduler ? 1ull << kSchedulerHolderBit : 1ull << client.tp_rank;
}

constexpr auto kRelaxed = std::memory_order_relaxed;

// Half a decision can't be taken back. So before a large operation is decided, the memory that its lists will
// need is made sure of, and some more for whatever else the daemon does meanwhile: false, and nothing has
// changed. A client's huge requests end as its own refusals, and not as the end of the daemon.
bool memory_to_decide(std::uint32_t pages) {
  constexpr std::uint32_t kLarge = 256;  // smaller ones live on what the larger ones leave
  // Lists of a lease, a write and a transfer take less than this for each page; none of them more than a
  // block.
  constexpr std::size_t kBytesPerPage = 256;
  constexpr std::size_t kSpareBytes = 8 * kMiB;
  constexpr std::size_t kBlockBytes = 2 * kMiB;
  static_assert(kMaxPagesPerOperation * sizeof(PrefixHash) <= kBlockBytes);
  if (pages < kLarge) return true;
  std::array<void*, (kMaxPagesPerOperation * kBytesPerPage + kSpareBytes) / kBlockBytes + 1> blocks{};
  const std::size_t wanted = (pages * kBytesPerPage + kSpareBytes) / kBlockBytes + 1;
  std::size_t got = 0;
  while (got < wanted) {
    void* const block = ::operator new(kBlockBytes, std::nothrow);
    if (block == nullptr) break;
    blocks[got++] = block;
  }
  for (std::size_t i = 0; i < got; ++i) ::operator delete(blocks[i]);
  return got == wanted;
}

}  // namespace

std::uint64_t Coordinator::Impl::deadline_of(const Submission& submission) const {
  const std::uint32_t wanted =
      submission.deadline_ms == 0 ? config.limits.operation_deadline_ms : submission.deadline_ms;
  return now_ns + std::uint64_t{std::min(wanted, config.limits.max_deadline_ms)} * 1'000'000;
}

void Coordinator::Impl::answer(Client& client, const Submission& submission, std::uint64_t sequence,
                               Status status) {
  Completion c;
  c.user_data = submission.user_data;
  c.opcode = submission.opcode;
  c.status = status;
  c.lease = submission.opcode == Opcode::reserve ? 0 : submission.sequence_or_lease;
  c.operation_sequence = sequence;
  complete(client, c);
}

// Everything that can be said about an entry without looking at leases or groups.
Status Coordinator::Impl::check(const Client& client, const Submission& s) const {
  if (static_cast<std::uint8_t>(s.opcode) >= kOpcodeCount || s.opcode == Opcode::none)
    return Status::invalid_argument;
  const bool may_have_states = s.opcode == Opcode::write || s.opcode == Opcode::load;
  const std::uint8_t known_flags = may_have_states ? Submission::kWithStates : 0;
  if ((s.flags & ~known_flags) != 0 || s.reserved0 != 0 || s.reserved1 != 0 || s.reserved2 != 0)
    return Status::invalid_argument;
  const bool has_list = s.opcode == Opcode::reserve || s.opcode == Opcode::write || s.opcode == Opcode::load;
  if (s.opcode == Opcode::prefetch) {
    if (s.arena_offset != 0 || s.fence_value != 0 || s.count == 0 || s.sequence_or_lease == 0)
      return Status::invalid_argument;
    if (s.fence != Submission::kNoFence && s.fence > static_cast<std::uint32_t>(PrefetchPolicy::timeout))
      return Status::invalid_argument;
    return s.count > kMaxPagesPerOperation || s.first > kMaxPagesPerOperation ? Status::too_large
                                                                              : Status::ok;
  }
  if (s.opcode == Opcode::check_prefetch || s.opcode == Opcode::end_prefetch) {
    const bool blank = s.arena_offset == 0 && s.count == 0 && s.fence_value == 0 &&
                       (s.fence == 0 || s.fence == Submission::kNoFence);
    return blank && s.first != 0 && s.sequence_or_lease != 0 ? Status::ok : Status::invalid_argument;
  }
  if (s.opcode == Opcode::backup) {
    const bool blank =
        s.arena_offset == 0 && s.fence_value == 0 && (s.fence == 0 || s.fence == Submission::kNoFence);
    if (!blank || s.count == 0 || s.sequence_or_lease == 0) return Status::invalid_argument;
    return s.count > kMaxPagesPerOperation || s.first > kMaxPagesPerOperation ? Status::too_large
                                                                              : Status::ok;
  }
  if (!has_list) {
    const bool blank = s.arena_offset == 0 && s.count == 0 && s.first == 0 && s.fence_value == 0 &&
                       (s.fence == 0 || s.fence == Submission::kNoFence);
    if (!blank || (s.opcode == Opcode::nop && s.sequence_or_lease != 0)) return Status::invalid_argument;
    if (s.opcode == Opcode::agree) {
      if (s.sequence_or_lease == 0) return Status::invalid_argument;
      if (client.role != Role::rank) return Status::not_permitted;
    }
    return Status::ok;
  }
  if (s.count == 0 || s.sequence_or_lease == 0) return Status::invalid_argument;
  if (s.count > kMaxPagesPerOperation || s.first > kMaxPagesPerOperation) return Status::too_large;
  const std::uint64_t bytes_per_page = s.opcode == Opcode::reserve ? sizeof(PrefixHash)
                                       : s.opcode == Opcode::write ? 2 * sizeof(std::uint32_t)
                                                                   : sizeof(std::uint32_t);
  const std::uint64_t states = (s.flags & Submission::kWithStates) != 0 ? sizeof(std::uint32_t) : 0;
  const std::uint64_t bytes = s.count * (bytes_per_page + states);
  if (s.arena_offset % 8 != 0 || bytes > client.geometry.arena_bytes ||
      s.arena_offset > client.geometry.arena_bytes - bytes) {
    return Status::invalid_argument;
  }
  if (s.opcode == Opcode::reserve) {
    if (s.fence_value != 0 || s.first > static_cast<std::uint32_t>(SequenceOrder::apart))
      return Status::invalid_argument;
    // A scheduler's sequences are apart as they are.
    const bool apart = s.first == static_cast<std::uint32_t>(SequenceOrder::apart);
    return apart && client.role != Role::rank ? Status::not_permitted : Status::ok;
  }
  if (client.role != Role::rank) return Status::not_permitted;
  const std::uint32_t fences = s.opcode == Opcode::write ? kWriteFences : kProducerSlots;
  if (s.fence != Submission::kNoFence && s.fence >= fences) return Status::invalid_argument;
  return Status::ok;
}

void Coordinator::Impl::execute(Client& client, const Submission& submission) {
  ++client.open_operations;
  const std::uint64_t sequence = ++operation_sequence;
  tables.header->operation_sequence.store(sequence, kRelaxed);
  stats.add(Counter::operations);
  ClientEntry& entry = clients.entry(client);
  bump(entry.operations);
  entry.last_operation_ns.store(now_ns, kRelaxed);
  note(FlightEvent::submit, &client, submission.opcode, Status::ok, submission.sequence_or_lease,
       submission.user_data, submission.count);

  Status status = check(client, submission);
  if (status == Status::ok && submission.opcode == Opcode::nop)
    return answer(client, submission, sequence, Status::ok);
  if (status != Status::ok) {
    stats.add(Counter::bad_entries);
    return answer(client, submission, sequence, status);
  }
  if (!memory_to_decide(submission.count)) {
    spdlog::warn("client {}: no memory to decide a {} of {} pages", client.slot.value,
                 to_string(submission.opcode), submission.count);
    return answer(client, submission, sequence, Status::again);
  }
  Group& group = groups.get(client.group);
  bump(groups.entry(group).operations);
  if (group.state == GroupState::broken) {
    stats.add(Counter::peer_lost);
    return answer(client, submission, sequence, Status::peer_lost);
  }
  // What is in flight ends first: its pages are released, and ranks may still join a write that others have
  // posted. An agreement begins nothing.
  const bool ends_something = submission.opcode == Opcode::release || submission.opcode == Opcode::write ||
                              submission.opcode == Opcode::agree ||
                              submission.opcode == Opcode::check_prefetch ||
                              submission.opcode == Opcode::end_prefetch;
  if (stopping.load(kRelaxed) && !ends_something) {
    return answer(client, submission, sequence, Status::shutting_down);
  }
  if (const Status admitted = admit(client, submission, sequence); admitted != Status::ok)
    return answer(client, submission, sequence, admitted);
  const auto scope = commit();
  switch (submission.opcode) {
    case Opcode::reserve:
      return execute_reserve(client, submission, sequence);
    case Opcode::write:
      return execute_write(client, submission, sequence);
    case Opcode::load:
      return execute_load(client, submission, sequence);
    case Opcode::release:
      return execute_release(client, submission, sequence);
    case Opcode::agree:
      return execute_agree(client, submission, sequence);
    case Opcode::prefetch:
      return execute_prefetch(client, submission, sequence);
    case Opcode::check_prefetch:
    case Opcode::end_prefetch:
      return execute_check_prefetch(client, submission, sequence);
    case Opcode::backup:
      return execute_backup(client, submission, sequence);
    case Opcode::none:
    case Opcode::nop:
      break;
  }
  answer(client, submission, sequence, Status::internal);
}

void Coordinator::Impl::execute_reserve(Client& client, const Submission& submission,
                                        std::uint64_t sequence) {
  Group& group = groups.get(client.group);
  const bool by_scheduler = client.role == Role::scheduler;
  const bool apart = submission.first == static_cast<std::uint32_t>(SequenceOrder::apart);
  SequenceWindow& window = group.sequences[by_scheduler ? 1 : apart ? 2 : 0];
  // The only read of the hash list: the lease keeps this copy.
  scratch_hashes.resize(submission.count);
  std::memcpy(static_cast<void*>(scratch_hashes.data()), client.arena + submission.arena_offset,
              submission.count * sizeof(PrefixHash));

  const auto found = window.look_up(submission.sequence_or_lease);
  Lease* lease = nullptr;
  switch (found.verdict) {
    case SequenceWindow::Verdict::too_old:
    case SequenceWindow::Verdict::ended:
      stats.add(Counter::stale_generation);
      return answer(client, submission, sequence, Status::stale_generation);
    case SequenceWindow::Verdict::joined: {
      lease = leases.find(found.lease).value();
      if ((lease->posted & holder_bit(client)) != 0)
        return answer(client, submission, sequence, Status::exists);
      lease->posted |= holder_bit(client);
      const bool was_poisoned = lease->poisoned();
      if (was_poisoned || lease->hashes != scratch_hashes) {
        if (!was_poisoned) {
          stats.add(Counter::divergences);
          bump(groups.entry(group).divergences);
          poison(*lease);
        }
        // This rank will not learn the lease: it holds nothing of it.
        leases.set_holders(*lease, lease->holders & ~holder_bit(client));
        answer(client, submission, sequence, was_poisoned ? Status::poisoned : Status::diverged);
        return try_close(*lease);
      }
      break;
    }
    case SequenceWindow::Verdict::fresh: {
      const bool complete =
          std::none_of(group.members.begin(), group.members.end(), [](ClientSlot m) { return m.is_none(); });
      const bool window_full = static_cast<bool>(found.lease);
      if (group.leases >= config.limits.leases_per_group) stats.add(Counter::quota_leases);
      if (!complete || window_full || group.leases >= config.limits.leases_per_group ||
          !leases.can_pin(submission.count)) {
        return answer(client, submission, sequence, Status::again);
      }
      lease = leases.open(group.slot, group.namespace_id, submission.sequence_or_lease,
                          by_scheduler ? holder_bit(client) : group.all_ranks(), scratch_hashes);
      if (lease == nullptr) return answer(client, submission, sequence, Status::again);
      window.open(submission.sequence_or_lease, lease->id());
      groups.change_leases(group, 1);
      namespaces.hold(lease->namespace_id);
      lease->posted = holder_bit(client);
      HICACHE_CRASH_POINT(reserve_opened);
      scratch_pages.clear();
      pages.find_leading_ready(lease->hashes, lease->namespace_id, scratch_pages);
      lease->present = static_cast<std::uint32_t>(scratch_pages.size());
      std::uint64_t room = pin_room(group);
      std::size_t fitting = 0;
      while (fitting < scratch_pages.size() && take_room(room, scratch_pages[fitting])) ++fitting;
      scratch_pages.resize(fitting);
      // Where states are needed, a prefix can only be continued behind a page that carries them.
      if (namespaces.get(lease->namespace_id).spec.has_states()) {
        while (!scratch_pages.empty() && !pages.has_states(scratch_pages.back())) scratch_pages.pop_back();
      }
      for (std::uint32_t i = 0; i < scratch_pages.size(); ++i) leases.pin(*lease, i, scratch_pages[i]);
      const auto hits = static_cast<std::uint32_t>(scratch_pages.size());
      leases.set_hits(*lease, hits);
      HICACHE_CRASH_POINT(reserve_pinned);
      stats.add(Counter::reserves);
      stats.add(Counter::pages_requested, submission.count);
      stats.add(Counter::hits, hits);
      if (hits == submission.count) stats.add(Counter::full_hits);
      bump(namespaces.entry(lease->namespace_id).hits, std::uint64_t{hits});
      break;
    }
  }
  Completion c;
  c.user_data = submission.user_data;
  c.opcode = Opcode::reserve;
  c.lease = lease->id().value;
  c.hits = lease->hits;
  c.present = lease->present;
  c.operation_sequence = sequence;
  complete(client, c);
}

Result<Lease*> Coordinator::Impl::lease_for(const Client& client, LeaseId id) {
  auto lease = leases.find(id);
  if (!lease) {
    if (lease.status() == Status::stale_generation) stats.add(Counter::stale_generation);
    return lease;
  }
  if ((*lease)->group != client.group) return Error{Status::unknown_lease, "", 0};
  return lease;
}

std::uint64_t Coordinator::Impl::pin_room(const Group& group) {
  std::vector<GroupSlot> active;
  groups.for_each([&](const Group& g) {
    if (g.state == GroupState::active) active.push_back(g.slot);
  });
  if (active.size() < 2) return ~0ull;
  const double each = config.limits.guaranteed_share / static_cast<double>(active.size());
  return leases.share().room(group.slot, active, pool_bytes,
                             static_cast<std::uint64_t>(each * static_cast<double>(pool_bytes)));
}

bool Coordinator::Impl::take_room(std::uint64_t& room, std::uint64_t cost) {
  if (cost > room) {
    stats.add(Counter::quota_pages);
    return false;
  }
  room -= cost;
  return true;
}

void Coordinator::Impl::poison(Lease& lease) {
  if (lease.poisoned()) return;
  stats.add(Counter::poisoned);
  lease.counts_as_use = false;
  leases.set_state(lease, LeaseState::poisoned);
  for (auto& write : lease.writes) {
    if (!write->ended) end_write(*write, Status::poisoned);
  }
  if (lease.prefetch && !lease.prefetch->ended) end_prefetch(*lease.prefetch, Status::poisoned);
}

bool Coordinator::Impl::read_device_pages(const Client& client, const Submission& submission) {
  static_assert(sizeof(DevicePage) == sizeof(std::uint32_t));
  const std::size_t bytes = submission.count * sizeof(DevicePage);
  const DeviceGeometry& geometry = client.memory->geometry;
  scratch_device_pages.resize(submission.count);
  std::memcpy(static_cast<void*>(scratch_device_pages.data()), client.arena + submission.arena_offset, bytes);
  scratch_states.assign(submission.count, DevicePage::none());
  if ((submission.flags & Submission::kWithStates) != 0) {
    std::memcpy(static_cast<void*>(scratch_states.data()), client.arena + submission.arena_offset + bytes,
                bytes);
  }
  return std::all_of(scratch_device_pages.begin(), scratch_device_pages.end(),
                     [&](DevicePage page) { return page.value < geometry.pages; }) &&
         std::all_of(scratch_states.begin(), scratch_states.end(),
                     [&](DevicePage slot) { return slot.is_none() || slot.value < geometry.states; });
}

// Pages that all ranks need, when the ranks' memory is on several devices.
std::optional<GroupLoad> Coordinator::Impl::group_load(const Client& client, const Lease& lease,
                                                       const Submission& submission) {
  const Group& group = groups.get(client.group);
  if (client.memory->device == nullptr || client.memory->spec.shards() != 1 || group.tp_size == 1)
    return std::nullopt;
  std::vector<std::uint32_t> devices;
  for (const ClientSlot member : group.members) {
    if (!member || clients.get(member).memory == nullptr || clients.get(member).memory->device == nullptr)
      return std::nullopt;
    const std::uint32_t device = clients.get(member).memory->device->device_index;
    if (std::find(devices.begin(), devices.end(), device) == devices.end()) devices.push_back(device);
  }
  if (devices.size() < 2) return std::nullopt;
  return GroupLoad{lease.id().value, submission.first, client.tp_rank, group.tp_size,
                   static_cast<std::uint32_t>(devices.size())};
}

void Coordinator::Impl::execute_load(Client& client, const Submission& submission, std::uint64_t sequence) {
  auto found = lease_for(client, LeaseId{submission.sequence_or_lease});
  if (!found) return answer(client, submission, sequence, found.status());
  Lease& lease = **found;
  const auto refuse = [&](Status status) {
    lease.loads_failed = true;  // on one rank, so the group can't use the pages
    answer(client, submission, sequence, status);
  };
  if (lease.poisoned()) return refuse(Status::poisoned);
  if (client.memory == nullptr) return refuse(Status::not_permitted);
  const std::uint64_t end = std::uint64_t{submission.first} + submission.count;
  if (end > lease.pages.size() || !read_device_pages(client, submission)) {
    return refuse(Status::invalid_argument);
  }
  const NamespaceSpec& spec = client.memory->spec;
  Transfer transfer;
  transfer.pages.reserve(submission.count);
  for (std::uint32_t i = 0; i < submission.count; ++i) {
    const PageId page = lease.pages[submission.first + i];
    if (!page || pages.state(page) != PageState::ready) return refuse(Status::not_found);
    if (scratch_states[i] && !pages.has_states(page)) return refuse(Status::not_found);
    transfer.pages.push_back(
        PagePair{scratch_device_pages[i],
                 PoolOffset{pages.offset(page).value + client.memory->shard * spec.shard_stride()},
                 scratch_states[i]});
  }
  transfer.id = TransferId{++next_number};
  transfer.memory = client.memory;
  transfer.direction = Direction::load;
  transfer.fence = submission.fence;
  transfer.fence_value = submission.fence_value;
  transfer.deadline_ns = deadline_of(submission);
  transfer.group = group_load(client, lease, submission);

  TransferOwner owner;
  owner.load =
      PendingLoad{lease.id(), client.slot, client.generation, submission.user_data, sequence, false, false};
  owner.tp_rank = client.tp_rank;
  transfers_in_flight.emplace(transfer.id.value, owner);
  set_deadline(Deadline{transfer.deadline_ns, transfer.id.value, 0});
  ++lease.loads_in_flight;
  ++client.copies_in_flight;
  transfers->submit(std::move(transfer));
  HICACHE_CRASH_POINT(load_posted);
}

void Coordinator::Impl::finish_load(const TransferDone& done, TransferOwner& owner) {
  HICACHE_CRASH_POINT(load_ended);
  const auto scope = commit();
  const PendingLoad& load = owner.load;
  auto lease = leases.find(load.lease);
  assert(lease.ok());
  --(*lease)->loads_in_flight;
  Client* client = clients.find(load.client, load.client_generation);
  assert(client != nullptr);
  --client->copies_in_flight;
  // What ended late has been told to its rank as a failure.
  if (done.status != Status::ok || load.answered) (*lease)->loads_failed = true;
  if (done.status == Status::ok) {
    stats.add(Counter::bytes_loaded, done.bytes);
    bump(clients.entry(*client).bytes_loaded, done.bytes);
  } else if (!load.answered) {
    stats.add(done.status == Status::timed_out ? Counter::timed_out : Counter::copies_failed);
  }
  stats.add(Counter::shards_verified, done.verified);
  for (const PoolOffset shard : done.corrupt) {
    stats.add(Counter::checksum_mismatches);
    for (const PageId page : (*lease)->pages) {
      if (!page || pages.state(page) != PageState::ready) continue;
      const std::uint64_t begin = pages.offset(page).value;
      if (shard.value < begin ||
          shard.value >= begin + namespaces.get(pages.namespace_of(page)).spec.slot_bytes())
        continue;
      quarantine(page);
      break;
    }
  }
  Completion c;
  c.user_data = load.user_data;
  c.opcode = Opcode::load;
  c.lease = load.lease.value;
  c.operation_sequence = load.operation_sequence;
  c.bytes = done.bytes;
  if (!load.answered) {
    c.status = done.status;
    complete(*client, c);
  } else if (load.owes_pages) {
    --client->owed_returns;
    c.flags = Completion::kPagesReturned;
    complete(*client, c);
  }
  try_close(**lease);
  remove_if_drained(*client);
}

// The page's bytes are not what was written. It becomes a miss at once, and so does what can only be found
// through it.
void Coordinator::Impl::quarantine(PageId top) {
  std::vector<PageId> order{top};
  for (std::size_t i = 0; i < order.size(); ++i) {
    pages.for_each_child(order[i], [&](PageId child) { order.push_back(child); });
  }
  spdlog::error(
      "page {} (key {}, pool offset {}) has a wrong checksum: quarantined, {} pages behind it dropped",
      top.value, to_hex(load_key(tables.pages[top.value])), pages.offset(top).value, order.size() - 1);
  stats.add(Counter::quarantined);
  for (std::size_t i = order.size(); i-- > 0;) {
    if (pages.state(order[i]) == PageState::filling) {
      give_up(order[i]);
    } else if (pages.state(order[i]) == PageState::ready) {
      pages.condemn(order[i], order[i] == top);
    }
  }
}

// What the engine's own state machine has refused since the last look: in the daemon's records it survives
// the engine. The words are the client's, so they are only shown.
void Coordinator::Impl::note_refusals(Client& client) {
  const std::uint32_t refusals = client.header->host_page_refusals.load(kRelaxed);
  const std::uint32_t before = std::exchange(client.refusals, refusals);
  if (refusals <= before) return;  // none, or a new count after a reset
  stats.add(Counter::refused_transitions, refusals - before);
  note(FlightEvent::refused_transition, &client, Opcode::none, Status::invalid_argument, 0,
       client.header->last_refusal.load(kRelaxed), refusals - before);
}

void Coordinator::Impl::execute_agree(Client& client, const Submission& submission, std::uint64_t sequence) {
  clients.mirror_handles(client);
  note_refusals(client);
  Group& group = groups.get(client.group);
  const auto progress = group.agreements.agree(submission.sequence_or_lease, holder_bit(client),
                                               group.all_ranks(), group.sequences[0]);
  if (!progress) return answer(client, submission, sequence, progress.status());
  Completion c;
  c.user_data = submission.user_data;
  c.opcode = Opcode::agree;
  c.lease = submission.sequence_or_lease;
  c.hits = progress->failed ? 1 : 0;
  c.bytes = progress->sequence;
  c.operation_sequence = sequence;
  complete(client, c);
}

void Coordinator::Impl::execute_release(Client& client, const Submission& submission,
                                        std::uint64_t sequence) {
  auto found = lease_for(client, LeaseId{submission.sequence_or_lease});
  if (!found) return answer(client, submission, sequence, found.status());
  Lease& lease = **found;
  if ((lease.holders & holder_bit(client)) == 0) {
    stats.add(Counter::double_release);
    return answer(client, submission, sequence, Status::already_released);
  }
  leases.set_holders(lease, lease.holders & ~holder_bit(client));
  HICACHE_CRASH_POINT(release_holder_gone);
  // The last release closes the lease before anybody learns of it: the next request finds it done.
  try_close(lease);
  answer(client, submission, sequence, Status::ok);
}

void Coordinator::Impl::try_close(Lease& lease) {
  if (lease.holders != 0 || lease.loads_in_flight != 0) return;
  for (const auto& write : lease.writes) {
    if (!write->ended || write->copying != 0) return;
  }
  // Nobody is left who could use what it still brings.
  if (lease.prefetch && !lease.prefetch->ended) end_prefetch(*lease.prefetch, Status::ok);
  const bool use = lease.counts_as_use;
  Group& group = groups.get(lease.group);
  const NamespaceId ns = lease.namespace_id;
  if (use) {
    leases.stamp_all(lease);
    offer_used_pages(lease);
  }
  HICACHE_CRASH_POINT(release_stamped);
  for (SequenceWindow& window : group.sequences) {
    if (window.look_up(lease.sequence).lease == lease.id()) window.end(lease.sequence, lease.loads_failed);
  }
  leases.close(lease);
  HICACHE_CRASH_POINT(release_closed);
  groups.change_leases(group, -1);
  if (namespaces.retired(ns)) evict_namespace(ns);
  namespaces.drop(ns);
  groups.collect(group);
}

}  // namespace hicache::daemon
