// Prefetches: pages of a lease that come from storage. One decision for the group; a page that several want
// is read once; pages become ready in prefix order as they arrive.
#include <algorithm>
#include <cassert>
#include <utility>

#include "daemon/coordinator/coordinator_impl.hpp"
#include "daemon/storage/prefetch_rules.hpp"
#include "shm/crash_points.hpp"

namespace hicache::daemon {

Prefetch* Coordinator::Impl::find_prefetch(std::uint64_t number) {
  const auto found = prefetches_in_flight.find(number);
  return found == prefetches_in_flight.end() ? nullptr : found->second;
}

void Coordinator::Impl::execute_prefetch(Client& client, const Submission& submission,
                                         std::uint64_t sequence) {
  auto found = lease_for(client, LeaseId{submission.sequence_or_lease});
  if (!found) return answer(client, submission, sequence, found.status());
  Lease& lease = **found;
  if (lease.poisoned()) return answer(client, submission, sequence, Status::poisoned);
  if (std::uint64_t{submission.first} + submission.count > lease.pages.size()) {
    return answer(client, submission, sequence, Status::invalid_argument);
  }
  if (lease.prefetch &&
      (lease.prefetch->first != submission.first || lease.prefetch->count != submission.count)) {
    stats.add(Counter::divergences);
    bump(groups.entry(groups.get(lease.group)).divergences);
    poison(lease);
    answer(client, submission, sequence, Status::diverged);
    return try_close(lease);
  }
  if (!lease.prefetch) decide_prefetch(lease, submission);
  Prefetch& prefetch = *lease.prefetch;
  for (const WaitingRank& other : prefetch.participants) {
    if (other.client == client.slot && other.client_generation == client.generation)
      return answer(client, submission, sequence, Status::exists);
  }
  prefetch.participants.push_back({client.slot, client.generation, submission.user_data, sequence});
  if (prefetch.ended) answer_participants(prefetch);
}

void Coordinator::Impl::decide_prefetch(Lease& lease, const Submission& submission) {
  lease.prefetch = std::make_unique<Prefetch>();
  Prefetch& p = *lease.prefetch;
  p.number = ++next_number;
  p.lease = lease.id();
  p.first = submission.first;
  p.count = submission.count;
  p.policy = submission.fence == Submission::kNoFence ? config.storage.prefetch_policy
                                                      : static_cast<PrefetchPolicy>(submission.fence);
  p.begun_ns = now_ns;
  p.deadline_ns = deadline_of(submission);
  stats.add(Counter::prefetches);
  prefetches_in_flight.emplace(p.number, &p);

  // What is ready already counts as there. Everything behind it is not: a ready page's parent is ready.
  std::uint64_t room = pin_room(groups.get(lease.group));
  std::uint32_t position = p.first;
  const std::uint32_t end = p.first + p.count;
  for (; position < end; ++position) {
    const PageId page = pages.find(lease.hashes[position], lease.namespace_id);
    if (!page || pages.state(page) != PageState::ready) break;
    if (!lease.pages[position]) {
      if (!leases.can_pin(1) || !take_room(room, page)) break;
      leases.pin(lease, position, page);
    }
    ++p.present;
  }
  p.begin = p.end = position;
  const std::uint32_t page_tokens = namespaces.get(lease.namespace_id).spec.page_tokens;
  const std::uint64_t tokens = std::uint64_t{end - position} * page_tokens;
  const auto no_parent = [&] {
    return position > 0 && !pages.find(lease.hashes[position - 1], lease.namespace_id);
  };
  if (position == end) return end_prefetch(p, Status::ok);
  if (!storage_attached()) {
    stats.add(Counter::prefetch_no_storage);
    return end_prefetch(p, Status::ok);
  }
  if (!worth_prefetching(tokens, config.storage.prefetch_threshold_tokens, page_tokens) || no_parent()) {
    stats.add(Counter::prefetch_short);
    return end_prefetch(p, Status::ok);
  }
  if (!prefetch_allowed(prefetching_bytes, prefetch_capacity(pool_bytes, config.storage.prefetch_capacity))) {
    stats.add(Counter::prefetch_limited);
    return end_prefetch(p, Status::ok);
  }
  p.query = LeadingHits(end - position);
  if (p.policy == PrefetchPolicy::timeout) {
    // Until it is known what storage has, the base has to do.
    p.limit_ns = now_ns + std::uint64_t{config.storage.prefetch_timeout_base_ms} * 1'000'000;
    set_deadline(Deadline{p.limit_ns, 0, 0, p.number});
  }
  set_deadline(Deadline{p.deadline_ns, 0, 0, p.number});
  query_storage(p);
}

void Coordinator::Impl::query_storage(Prefetch& p) {
  const LeadingHits::Batch batch = p.query.next();
  assert(batch.count > 0);
  const Lease& lease = *leases.find(p.lease).value();
  const auto from = lease.hashes.begin() + static_cast<std::ptrdiff_t>(p.begin + batch.first);
  StorageWork work;
  work.number = p.number;
  p.query_request = send_to_storage(StorageOperation::exists, lease.namespace_id, lease.group.value,
                                    {from, from + static_cast<std::ptrdiff_t>(batch.count)}, std::move(work));
  stats.add(Counter::storage_queried, batch.count);
  HICACHE_CRASH_POINT(prefetch_asked);
}

// `found` leading pages of the last question are there.
void Coordinator::Impl::take_query_answer(Prefetch& p, std::size_t found) {
  p.query_request = 0;
  p.query.answer(found);
  stats.add(Counter::storage_hits, found);
  if (!p.query.done()) return query_storage(p);
  p.hits = static_cast<std::uint32_t>(p.query.hits());
  const Lease& lease = *leases.find(p.lease).value();
  const std::uint32_t page_tokens = namespaces.get(lease.namespace_id).spec.page_tokens;
  const std::uint64_t tokens = std::uint64_t{p.hits} * page_tokens;
  if (!worth_prefetching(tokens, config.storage.prefetch_threshold_tokens, page_tokens)) {
    stats.add(Counter::prefetch_revoked);
    return end_prefetch(p, Status::ok);
  }
  if (p.policy == PrefetchPolicy::timeout) {
    const auto& s = config.storage;
    const PrefetchTimeLimit limit{std::uint64_t{s.prefetch_timeout_base_ms} * 1000,
                                  std::uint64_t{s.prefetch_timeout_per_ki_token_ms} * 1000,
                                  std::uint64_t{s.prefetch_timeout_max_ms} * 1000};
    p.limit_ns = p.begun_ns + limit.us_for(tokens) * 1000;
    set_deadline(Deadline{p.limit_ns, 0, 0, p.number});
  }
  begin_fetching(p);
}

// Takes room for what storage has, and no more, and asks for it in prefix order.
void Coordinator::Impl::begin_fetching(Prefetch& p) {
  Lease& lease = *leases.find(p.lease).value();
  const Namespace& ns = namespaces.get(lease.namespace_id);
  std::uint64_t room = pin_room(groups.get(lease.group));
  std::vector<PageId> to_read;
  PageId previous;
  if (p.begin > 0) previous = pages.find(lease.hashes[p.begin - 1], lease.namespace_id);
  // Its parent may have gone while storage was asked: then nothing could be found behind it.
  const bool broken_chain = p.begin > 0 && !previous;
  const std::uint32_t end = broken_chain ? p.begin : p.begin + p.hits;
  for (p.end = p.begin; p.end < end; ++p.end) {
    PageId page = pages.find(lease.hashes[p.end], lease.namespace_id);
    if (page && pages.state(page) == PageState::ready) {
      if (!lease.pages[p.end]) {
        if (!leases.can_pin(1) || !take_room(room, page)) break;
        leases.pin(lease, p.end, page);
      }
      ++p.present;
      previous = page;
      continue;
    }
    if (page) {
      stats.add(Counter::prefetch_shared);
      if (!lease.pages[p.end] && !leases.can_pin(1)) break;
      wait_for_page(p, lease, p.end, page);
      previous = page;
      continue;
    }
    if (!take_room(room, pages.pin_cost(ns.size_class))) break;
    NewPage fresh;
    fresh.key = lease.hashes[p.end];
    fresh.namespace_id = lease.namespace_id;
    fresh.size_class = ns.size_class;
    fresh.parent = previous;
    fresh.depth = previous ? pages.depth(previous) + 1 : 0;
    fresh.filler = lease.slot;
    fresh.node = groups.get(lease.group).node;
    fresh.dirty = false;
    if (previous) fresh.near = pages.offset(previous);
    // A parent that nobody pins must not be evicted to make room for its own child.
    if (previous) pages.pin(previous);
    page = leases.can_pin(1) ? pages.allocate(fresh) : PageId::none();
    if (previous) pages.unpin(previous);
    if (!page) break;
    if (lease.pages[p.end]) leases.drop_pin(lease, p.end);  // one that was quarantined meanwhile
    fillers[page.value] = Filler{nullptr, 0, true, true};
    wait_for_page(p, lease, p.end, page);
    ++p.held;
    to_read.push_back(page);
    previous = page;
  }
  stats.add(Counter::prefetching_pages, p.held);
  prefetching_bytes += p.held * ns.spec.slot_bytes();
  HICACHE_CRASH_POINT(prefetch_admitted);
  send_fetches(p, to_read);
  HICACHE_CRASH_POINT(prefetch_sent);
  maybe_complete.push_back(p.number);
}

void Coordinator::Impl::send_fetches(Prefetch& p, std::span<const PageId> to_read) {
  const Lease& lease = *leases.find(p.lease).value();
  for (std::size_t at = 0; at < to_read.size(); at += kStorageBatchPages) {
    const auto batch = to_read.subspan(at, std::min<std::size_t>(kStorageBatchPages, to_read.size() - at));
    StorageWork work;
    work.number = p.number;
    work.pages.assign(batch.begin(), batch.end());
    std::vector<PrefixHash> hashes;
    for (const PageId page : batch) hashes.push_back(load_key(tables.pages[page.value]));
    p.requests.push_back(send_to_storage(StorageOperation::get, lease.namespace_id, lease.group.value,
                                         std::move(hashes), std::move(work)));
  }
}

void Coordinator::Impl::wait_for_page(Prefetch& p, Lease& lease, std::uint32_t position, PageId page) {
  const bool pins = !lease.pages[position];
  if (pins) leases.pin(lease, position, page);
  waiting[page.value].push_back({&p, position, pins});
  ++p.unresolved;
}

void Coordinator::Impl::tell_waiting(PageId page, bool ready, bool from_storage) {
  const auto found = waiting.find(page.value);
  if (found == waiting.end()) return;
  const std::vector<PrefetchWait> all = std::move(found->second);
  waiting.erase(found);
  for (const PrefetchWait& wait : all) {
    Prefetch& p = *wait.prefetch;
    --p.unresolved;
    if (ready) {
      ++(from_storage ? p.fetched : p.present);
    } else if (wait.pinned) {
      leases.drop_pin(*leases.find(p.lease).value(), wait.position);
    }
    maybe_complete.push_back(p.number);
  }
}

// Ends it for every rank: what is ready stays pinned by the lease, what has not come is given up unless
// somebody else waits for it.
void Coordinator::Impl::end_prefetch(Prefetch& p, Status status) {
  assert(!p.ended);
  p.ended = true;
  p.end_status = status;
  if (p.query_request != 0) storage->cancel(StorageBatchId{std::exchange(p.query_request, 0)});
  if (p.unresolved > 0) stats.add(Counter::prefetch_cut);
  Lease& lease = *leases.find(p.lease).value();
  // The last page first: giving one up takes everything behind it along.
  for (std::uint32_t position = p.end; p.unresolved > 0 && position-- > p.begin;) {
    const PageId page = lease.pages[position];
    const auto found = page ? waiting.find(page.value) : waiting.end();
    if (found == waiting.end()) continue;
    auto& waits = found->second;
    const auto mine = std::find_if(waits.begin(), waits.end(),
                                   [&](const PrefetchWait& wait) { return wait.prefetch == &p; });
    if (mine == waits.end()) continue;
    const bool pinned = mine->pinned;
    waits.erase(mine);
    --p.unresolved;
    if (pinned) leases.drop_pin(lease, position);
    if (!waits.empty()) {
      if (fillers[page.value].storage)
        pages.set_filler(page, leases.find(waits.front().prefetch->lease).value()->slot);
      continue;
    }
    waiting.erase(found);
    if (fillers[page.value].storage) give_up(page);
  }
  assert(p.unresolved == 0);
  for (const std::uint64_t request : p.requests) {
    const auto work = storage_work.find(request);
    if (work == storage_work.end()) continue;
    const auto& read = work->second.pages;
    const bool wanted = std::any_of(read.begin(), read.end(),
                                    [&](PageId page) { return pages.state(page) == PageState::filling; });
    if (!wanted) storage->cancel(StorageBatchId{request});
  }
  stats.sub(Counter::prefetching_pages, p.held);
  prefetching_bytes -= p.held * namespaces.get(lease.namespace_id).spec.slot_bytes();
  prefetches_in_flight.erase(p.number);
  HICACHE_CRASH_POINT(prefetch_ended);
  answer_participants(p);
  maybe_finished.push_back(p.lease);
}

void Coordinator::Impl::end_finished_prefetches() {
  if (maybe_complete.empty()) return;
  const auto scope = commit();
  for (std::size_t i = 0; i < maybe_complete.size(); ++i) {
    Prefetch* p = find_prefetch(maybe_complete[i]);
    if (p != nullptr && p->complete()) end_prefetch(*p, Status::ok);
  }
  maybe_complete.clear();
}

// Answers everybody who has posted and has no answer yet.
void Coordinator::Impl::answer_participants(Prefetch& p) {
  Completion c;
  c.opcode = Opcode::prefetch;
  c.status = p.end_status;
  c.lease = p.lease.value;
  c.hits = p.hits;
  c.written = p.fetched;
  c.present = p.present;
  c.dropped = p.count - p.fetched - p.present;
  answer_all(p.participants, c);
}

// The same answer for every rank that waits, each under its own number.
void Coordinator::Impl::answer_all(std::vector<WaitingRank>& ranks, Completion c) {
  for (const WaitingRank& rank : std::exchange(ranks, {})) {
    Client* client = clients.find(rank.client, rank.client_generation);
    if (client == nullptr) continue;
    c.user_data = rank.user_data;
    c.operation_sequence = rank.operation_sequence;
    complete(*client, c);
  }
}

void Coordinator::Impl::expire_prefetch(const Deadline& due) {
  Prefetch* p = find_prefetch(due.prefetch);
  if (p == nullptr) return;
  if (due.at_ns >= p->deadline_ns) {
    stats.add(Counter::timed_out);
    end_prefetch(*p, Status::timed_out);
  } else if (due.at_ns >= p->limit_ns) {
    end_prefetch(*p, Status::ok);
  }
}

// May the request run? The first rank that asks a question decides it, the others read the same answer.
void Coordinator::Impl::execute_check_prefetch(Client& client, const Submission& submission,
                                               std::uint64_t sequence) {
  auto found = lease_for(client, LeaseId{submission.sequence_or_lease});
  if (!found) return answer(client, submission, sequence, found.status());
  Lease& lease = **found;
  if (lease.poisoned()) return answer(client, submission, sequence, Status::poisoned);
  if (!lease.prefetch) return answer(client, submission, sequence, Status::not_found);
  Prefetch& p = *lease.prefetch;
  const std::uint32_t number = submission.first;
  if (number > p.last_check + 1) return answer(client, submission, sequence, Status::invalid_argument);
  if (number == p.last_check + 1) {
    p.last_check = number;
    const bool over = submission.opcode == Opcode::end_prefetch || p.policy == PrefetchPolicy::best_effort ||
                      (p.limit_ns != 0 && now_ns >= p.limit_ns);
    if (!p.ended && (p.complete() || over)) end_prefetch(p, Status::ok);
    if (p.ended && p.ended_at_check == 0) p.ended_at_check = number;
  }
  Completion c;
  c.user_data = submission.user_data;
  c.opcode = submission.opcode;
  c.lease = submission.sequence_or_lease;
  c.operation_sequence = sequence;
  if (p.ended_at_check != 0 && number >= p.ended_at_check) {
    c.status = p.end_status;
    c.hits = p.hits;
    c.written = p.fetched;
    c.present = p.present;
    c.dropped = p.count - p.fetched - p.present;
  } else {
    c.filling = p.count;
  }
  complete(client, c);
}

}  // namespace hicache::daemon
