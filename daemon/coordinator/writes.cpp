// Group writes: one decision for all ranks, publication in prefix order, and what happens when a part fails.
#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>

#include "daemon/coordinator/coordinator_impl.hpp"
#include "daemon/transfer/page_spread.hpp"
#include "shm/crash_points.hpp"

namespace hicache::daemon {
namespace {

constexpr std::uint32_t kAhead = 8;  // pages whose cache misses overlap

}  // namespace

void Coordinator::Impl::execute_write(Client& client, const Submission& submission, std::uint64_t sequence) {
  auto found = lease_for(client, LeaseId{submission.sequence_or_lease});
  if (!found) return answer(client, submission, sequence, found.status());
  Lease& lease = **found;
  if (lease.poisoned()) return answer(client, submission, sequence, Status::poisoned);
  if (client.memory == nullptr) return answer(client, submission, sequence, Status::not_permitted);
  const std::uint64_t end = std::uint64_t{submission.first} + submission.count;
  if (end > lease.pages.size() || !read_device_pages(client, submission)) {
    return answer(client, submission, sequence, Status::invalid_argument);
  }
  // The same range posted by the other ranks, with states of the same pages, is this operation; another range
  // that overlaps it is not what they do.
  GroupWrite* write = nullptr;
  for (auto& other : lease.writes) {
    const bool same = other->first == submission.first && other->pages.size() == submission.count &&
                      std::equal(scratch_states.begin(), scratch_states.end(), other->pages.begin(),
                                 [](DevicePage slot, const WritePage& page) {
                                   return page.states == static_cast<bool>(slot);
                                 });
    const bool apart = end <= other->first || submission.first >= other->first + other->pages.size();
    if (same) {
      write = other.get();
    } else if (!apart) {
      stats.add(Counter::divergences);
      bump(groups.entry(groups.get(lease.group)).divergences);
      poison(lease);
      answer(client, submission, sequence, Status::diverged);
      return try_close(lease);
    }
  }
  const bool undecided = write == nullptr;
  if (undecided) {
    if (stopping.load(std::memory_order_relaxed))
      return answer(client, submission, sequence, Status::shutting_down);
    write = &open_write(lease, submission);
  }
  WriteParticipant& rank = write->ranks[client.tp_rank];
  if (rank.posted) return answer(client, submission, sequence, Status::exists);
  rank.posted = true;
  rank.client = client.slot;
  rank.client_generation = client.generation;
  rank.user_data = submission.user_data;
  rank.operation_sequence = sequence;
  const std::uint64_t lists = (submission.flags & Submission::kWithStates) != 0 ? 2 : 1;
  rank.results_at = submission.arena_offset + lists * submission.count * sizeof(std::uint32_t);
  if (write->ended) return answer_participant(*write, rank);
  WriteDecision decision;
  if (undecided) decision = begin_decision(lease, submission);
  for (std::uint32_t first = 0; first < submission.count;) {
    const std::uint32_t block_end = first + std::min(write_block, submission.count - first);
    if (undecided) decide_pages(lease, submission, first, block_end, *write, decision);
    start_rank_copy(client, submission, first, block_end, *write);
    first = block_end;
  }
  end_write_if_resolved(*write);
}

GroupWrite& Coordinator::Impl::open_write(Lease& lease, const Submission& submission) {
  lease.writes.push_back(std::make_unique<GroupWrite>());
  GroupWrite& write = *lease.writes.back();
  write.lease = lease.id();
  write.first = submission.first;
  write.pages.resize(submission.count);
  write.ranks.resize(groups.get(lease.group).tp_size);
  write.number = ++next_number;
  writes_in_flight.emplace(write.number, &write);
  set_deadline(Deadline{deadline_of(submission), 0, write.number});
  return write;
}

WriteDecision Coordinator::Impl::begin_decision(const Lease& lease, const Submission& submission) {
  WriteDecision decision;
  decision.room = pin_room(groups.get(lease.group));
  if (submission.first > 0) {
    decision.previous = pages.find(lease.hashes[submission.first - 1], lease.namespace_id);
    decision.broken_chain = decision.previous.is_none();
  }
  return decision;
}

void Coordinator::Impl::decide_pages(Lease& lease, const Submission& submission, std::uint32_t first,
                                     std::uint32_t end, GroupWrite& write, WriteDecision& decision) {
  const Namespace& ns = namespaces.get(lease.namespace_id);
  auto& [room, previous, broken_chain] = decision;
  const std::uint32_t dropped_before = write.dropped;
  for (std::uint32_t i = first; i < end; ++i) {
    const std::uint32_t position = submission.first + i;
    if (i + kAhead < submission.count) pages.prefetch(lease.hashes[position + kAhead], lease.namespace_id);
    pages.prefetch_free(kAhead);
    WritePage& slot = write.pages[i];
    slot.states = static_cast<bool>(scratch_states[i]);
    if (broken_chain) {
      slot.status = Status::dropped;
      ++write.dropped;
      continue;
    }
    const PrefixHash& key = lease.hashes[position];
    const PageId present = pages.find(key, lease.namespace_id);
    if (present && pages.state(present) == PageState::ready) {
      slot.status = Status::exists;
      ++write.present;
      stats.add(Counter::skipped_ready);
      if (lease.pages[position] && lease.pages[position] != present) leases.drop_pin(lease, position);
      if (!lease.pages[position] && leases.can_pin(1) && take_room(room, present))
        leases.pin(lease, position, present);
      previous = present;
      continue;
    }
    if (present) {
      slot.status = Status::busy;
      ++write.filling;
      stats.add(Counter::skipped_filling);
      previous = present;
      continue;
    }
    NewPage fresh;
    fresh.key = key;
    fresh.namespace_id = lease.namespace_id;
    fresh.size_class = ns.size_class;
    fresh.parent = previous;
    // Not the position: another request may have the same page at another depth, and a tree has only one.
    fresh.depth = previous ? pages.depth(previous) + 1 : 0;
    fresh.filler = lease.slot;
    fresh.node = groups.get(lease.group).node;
    if (previous) fresh.near = pages.offset(previous);
    fresh.states = slot.states;
    const bool fits = take_room(room, pages.pin_cost(ns.size_class));
    // A parent that nobody pins must not be evicted to make room for its own child.
    if (previous) pages.pin(previous);
    const PageId page = fits && leases.can_pin(1) ? pages.allocate(fresh) : PageId::none();
    if (previous) pages.unpin(previous);
    if (!page) {
      slot.status = Status::dropped;
      ++write.dropped;
      broken_chain = true;
      continue;
    }
    fillers[page.value] = Filler{&write, i, false, false};
    slot.page = page;
    if (lease.pages[position]) leases.drop_pin(lease, position);  // one that was quarantined meanwhile
    leases.pin(lease, position, page);
    ++write.unresolved;
    previous = page;
  }
  stats.add(Counter::dropped, write.dropped - dropped_before);
  HICACHE_CRASH_POINT(admit_decided);
}

void Coordinator::Impl::start_rank_copy(Client& client, const Submission& submission, std::uint32_t first,
                                        std::uint32_t end, GroupWrite& write) {
  const RankMemory& memory = *client.memory;
  const auto tp_size = static_cast<std::uint32_t>(write.ranks.size());
  // MLA: every rank holds the same bytes, so each page is written by one rank, spread over the group.
  const bool shared_shard = memory.spec.shards() == 1 && tp_size > 1;
  const PageSpread spread(write.first, write.pages.size(), tp_size);
  WriteParticipant& rank = write.ranks[client.tp_rank];
  TransferOwner owner;
  owner.write_number = write.number;
  owner.tp_rank = client.tp_rank;
  owner.first = rank.positions.size();
  Transfer transfer;
  transfer.pages.reserve(shared_shard ? (end - first) / tp_size + 1 : end - first);
  for (std::uint32_t i = first; i < end; ++i) {
    const WritePage& slot = write.pages[i];
    if (slot.status != Status::again) continue;
    if (shared_shard && spread.way_of(i) != client.tp_rank) continue;
    rank.positions.push_back(i);
    transfer.pages.push_back(
        PagePair{scratch_device_pages[i],
                 PoolOffset{pages.offset(slot.page).value + memory.shard * memory.spec.shard_stride()},
                 scratch_states[i]});
  }
  if (transfer.pages.empty()) return;
  owner.end = rank.positions.size();
  if (memory.kernel != nullptr) {
    for (std::size_t i = owner.first; i < owner.end; ++i)
      pages.lease_to(write.pages[rank.positions[i]].page, client.pool_tag);
  }
  transfer.id = TransferId{++next_number};
  transfer.memory = client.memory;
  transfer.direction = Direction::write;
  transfer.fence = submission.fence;
  transfer.fence_value = submission.fence_value;
  transfer.deadline_ns = deadline_of(submission);
  rank.copying.push_back(transfer.id);
  ++write.copying;
  ++client.copies_in_flight;
  transfers_in_flight.emplace(transfer.id.value, owner);
  transfers->submit(std::move(transfer));
}

void Coordinator::Impl::finish_rank_copy(const TransferDone& done, const TransferOwner& owner) {
  const auto scope = commit();
  // A write stays in flight until its last copy has ended, so it is still there.
  GroupWrite& write = *writes_in_flight.at(owner.write_number);
  WriteParticipant& rank = write.ranks[owner.tp_rank];
  Client* client = clients.find(rank.client, rank.client_generation);
  assert(client != nullptr);
  const std::size_t ended = std::erase(rank.copying, done.id);
  assert(ended == 1);
  static_cast<void>(ended);
  --client->copies_in_flight;
  --write.copying;
  rank.bytes += done.bytes;
  auto lease = leases.find(write.lease);
  assert(lease.ok());

  if (!write.ended && done.status != Status::ok) {
    stats.add(done.status == Status::timed_out ? Counter::timed_out : Counter::copies_failed);
    end_write(write, done.status);
  } else if (!write.ended) {
    stats.add(Counter::bytes_written, done.bytes);
    bump(clients.entry(*client).bytes_written, done.bytes);
    const std::uint32_t shards = client->memory->spec.shards();
    for (std::size_t i = owner.first; i < owner.end; ++i) {
      if (i + kAhead < owner.end) pages.prefetch(write.pages[rank.positions[i + kAhead]].page);
      const WritePage& slot = write.pages[rank.positions[i]];
      if (slot.status != Status::again) continue;  // given up meanwhile
      if (pages.complete_shard(slot.page, client->memory->shard, shards) &&
          pages.publishable(slot.page, shards)) {
        publish_from(slot.page);
      }
    }
    end_write_if_resolved(write);
  }
  if (rank.owes_pages && rank.copying.empty()) {
    rank.owes_pages = false;
    --client->owed_returns;
    Completion c;
    c.user_data = rank.user_data;
    c.opcode = Opcode::write;
    c.flags = Completion::kPagesReturned;
    c.lease = write.lease.value;
    c.operation_sequence = rank.operation_sequence;
    complete(*client, c);
  }
  if (write.copying == 0) release_aborted(write);
  if (write.ended && write.copying == 0) writes_in_flight.erase(write.number);
  try_close(**lease);
  remove_if_drained(*client);
}

// Publishes a page and every descendant that only waited for it.
void Coordinator::Impl::publish_from(PageId first) {
  std::vector<PageId>& stack = scratch_publish;
  stack.assign(1, first);
  while (!stack.empty()) {
    const PageId page = stack.back();
    stack.pop_back();
    const Filler& filler = fillers[page.value];
    pages.publish(page, filler.storage ? PageSource::storage : PageSource::device);
    HICACHE_CRASH_POINT(publish_ready);
    offer_backup(page, filler.storage ? GroupSlot{} : leases.find(filler.write->lease).value()->group);
    resolve(page, Status::ok);
    const std::uint32_t shards = namespaces.get(pages.namespace_of(page)).spec.shards();
    pages.for_each_child(page, [&](PageId child) {
      if (pages.publishable(child, shards)) stack.push_back(child);
    });
  }
}

// Records how the fill of a page ended in the write that fills it and with those who wait for it.
void Coordinator::Impl::resolve(PageId page, Status status) {
  const Filler filler = std::exchange(fillers[page.value], Filler{});
  if (status != Status::ok) tell_asking(page, pages.word(page).generation, false);
  tell_waiting(page, status == Status::ok, filler.storage);
  if (filler.storage) return;
  assert(filler.write != nullptr);
  GroupWrite& write = *filler.write;
  WritePage& slot = write.pages[filler.position];
  assert(slot.status == Status::again && slot.page == page);
  slot.status = status;
  --write.unresolved;
  if (status == Status::ok) {
    ++write.written;
  } else {
    ++write.dropped;
  }
  end_write_if_resolved(write);
}

// Gives a page up that was being filled, and first every descendant: a page whose parent is missing can't be
// found.
void Coordinator::Impl::give_up(PageId top) {
  std::vector<PageId> order{top};
  for (std::size_t i = 0; i < order.size(); ++i) {
    pages.for_each_child(order[i], [&](PageId child) { order.push_back(child); });
  }
  for (std::size_t i = order.size(); i-- > 0;) {
    const PageId page = order[i];
    const Filler filler = fillers[page.value];
    if (filler.storage) {
      pages.abort(page);
      resolve(page, Status::dropped);
      // Until storage has told how its read ended, the slot is nobody's.
      if (!filler.reading) pages.finish_abort(page);
      continue;
    }
    GroupWrite& write = *filler.write;
    auto lease = leases.find(write.lease);
    assert(lease.ok());
    leases.drop_pin(**lease, write.first + filler.position);
    pages.abort(page);
    write.aborting.push_back(page);
    resolve(page, Status::dropped);
    if (write.copying == 0) release_aborted(write);
  }
}

void Coordinator::Impl::release_aborted(GroupWrite& write) {
  for (const PageId page : write.aborting) pages.finish_abort(page);
  write.aborting.clear();
}

void Coordinator::Impl::end_write_if_resolved(GroupWrite& write) {
  if (write.ended || write.unresolved != 0) return;
  end_write(write, Status::ok);
}

// Ends the operation for every rank. Pages that are not published by now never will be.
void Coordinator::Impl::end_write(GroupWrite& write, Status status) {
  assert(!write.ended);
  write.ended = true;
  write.end_status = status;
  for (WritePage& slot : write.pages) {
    if (slot.status == Status::again) give_up(slot.page);
  }
  for (WriteParticipant& rank : write.ranks) {
    if (!rank.posted || rank.answered) continue;
    for (const TransferId copy : rank.copying) transfers->cancel(copy);
    answer_participant(write, rank);
  }
  if (write.copying == 0) {
    release_aborted(write);
    writes_in_flight.erase(write.number);
  }
  maybe_finished.push_back(write.lease);
  HICACHE_CRASH_POINT(write_answered);
}

// Leases whose last operation ended inside another lease's decision. Closing them there would pull the lease
// away under the code that is still walking it.
void Coordinator::Impl::close_finished_leases() {
  if (maybe_finished.empty()) return;
  const auto scope = commit();
  for (std::size_t i = 0; i < maybe_finished.size(); ++i) {
    if (auto lease = leases.find(maybe_finished[i])) try_close(**lease);
  }
  maybe_finished.clear();
}

void Coordinator::Impl::answer_participant(GroupWrite& write, WriteParticipant& rank) {
  rank.answered = true;
  Client* client = clients.find(rank.client, rank.client_generation);
  if (client == nullptr) return;
  Completion c;
  c.user_data = rank.user_data;
  c.opcode = Opcode::write;
  c.status = write.end_status;
  c.lease = write.lease.value;
  c.written = write.written;
  c.present = write.present;
  c.filling = write.filling;
  c.dropped = write.dropped;
  c.operation_sequence = rank.operation_sequence;
  c.bytes = rank.bytes;
  if (!rank.copying.empty()) {
    c.flags = Completion::kPagesBusy;
    rank.owes_pages = true;
    ++client->owed_returns;
  }
  if (client->state == ClientState::attached) {
    std::uint8_t* results = client->arena + rank.results_at;  // checked when the operation was posted
    for (std::size_t i = 0; i < write.pages.size(); ++i) {
      const auto word = static_cast<std::uint32_t>(write.pages[i].status);
      std::memcpy(results + i * sizeof word, &word, sizeof word);
    }
  }
  complete(*client, c);
}

}  // namespace hicache::daemon
