// Engines that want to know what became of a backup. The first rank that asks decides for its group: pages
// that storage lacks and that are not on their way there are queued. Backups that nobody asks about cost one
// look at an empty table.
#include <algorithm>
#include <cassert>
#include <utility>

#include "daemon/coordinator/coordinator_impl.hpp"

namespace hicache::daemon {

void Coordinator::Impl::execute_backup(Client& client, const Submission& submission, std::uint64_t sequence) {
  auto found = lease_for(client, LeaseId{submission.sequence_or_lease});
  if (!found) return answer(client, submission, sequence, found.status());
  Lease& lease = **found;
  if (lease.poisoned()) return answer(client, submission, sequence, Status::poisoned);
  if (std::uint64_t{submission.first} + submission.count > lease.pages.size()) {
    return answer(client, submission, sequence, Status::invalid_argument);
  }
  std::shared_ptr<BackupAsk> ask;
  for (const auto& other : lease.backups) {
    if (other->first == submission.first && other->count == submission.count) ask = other;
  }
  if (ask == nullptr) {
    if (lease.backups.size() >= BackupAsks::kMostPerLease) {
      return answer(client, submission, sequence, Status::again);
    }
    ask = decide_backup(lease, submission);
  }
  for (const WaitingRank& other : ask->participants) {
    if (other.client == client.slot && other.client_generation == client.generation)
      return answer(client, submission, sequence, Status::exists);
  }
  ask->participants.push_back({client.slot, client.generation, submission.user_data, sequence});
  if (ask->ended) answer_participants(*ask);
}

std::shared_ptr<BackupAsk> Coordinator::Impl::decide_backup(Lease& lease, const Submission& submission) {
  auto ask = std::make_shared<BackupAsk>();
  ask->number = ++next_number;
  ask->lease = lease.id();
  ask->group = lease.group;
  ask->first = submission.first;
  ask->count = submission.count;
  lease.backups.push_back(ask);
  stats.add(Counter::backup_asks);
  if (backup_asks.waits >= std::size_t{BackupAsks::kMostPerPage} * pages.capacity()) {
    ask->ended = true;
    ask->end_status = Status::again;
    return ask;
  }
  const bool may_queue = storage_attached() && config.storage.backup_policy != BackupPolicy::none;
  for (std::uint32_t i = 0; i < submission.count; ++i) {
    const PageId page = pages.find(lease.hashes[submission.first + i], lease.namespace_id);
    if (!page) continue;
    if (pages.state(page) == PageState::ready) {
      if (!pages.dirty(page)) {
        ++ask->kept;
        continue;
      }
      const bool on_its_way = pages.storing(page) || backups.queued[page.value];
      if (!on_its_way && !may_queue) continue;
      if (!on_its_way) add_candidate(page, lease.group.value);
    }
    backup_asks.waiting[BackupAsks::key_of(page, pages.word(page).generation)].push_back(ask);
    ++backup_asks.waits;
    ++ask->unresolved;
  }
  if (ask->unresolved == 0) {
    ask->ended = true;
    return ask;
  }
  backup_asks.open.emplace(ask->number, ask);
  Deadline deadline;
  deadline.at_ns = deadline_of(submission);
  deadline.backup = ask->number;
  set_deadline(deadline);
  return ask;
}

bool Coordinator::Impl::asked_about(PageId page) const {
  return !backup_asks.waiting.empty() &&
         backup_asks.waiting.contains(BackupAsks::key_of(page, pages.word(page).generation));
}

// The fate of a page is known.
void Coordinator::Impl::tell_asking(PageId page, Generation generation, bool kept) {
  if (backup_asks.waiting.empty()) return;
  const auto found = backup_asks.waiting.find(BackupAsks::key_of(page, generation));
  if (found == backup_asks.waiting.end()) return;
  const auto all = std::move(found->second);
  backup_asks.waiting.erase(found);
  backup_asks.waits -= all.size();
  for (const auto& ask : all) {
    assert(ask->unresolved > 0);
    --ask->unresolved;
    if (ask->ended) continue;
    if (kept) ++ask->kept;
    if (ask->unresolved == 0) end_backup_ask(*ask, Status::ok);
  }
}

void Coordinator::Impl::end_backup_ask(BackupAsk& ask, Status status) {
  assert(!ask.ended);
  ask.ended = true;
  ask.end_status = status;
  answer_participants(ask);
  backup_asks.open.erase(ask.number);  // the lease and the waiting lists still hold it
}

void Coordinator::Impl::answer_participants(BackupAsk& ask) {
  Completion c;
  c.opcode = Opcode::backup;
  c.status = ask.end_status;
  c.lease = ask.lease.value;
  c.written = ask.kept;
  c.dropped = ask.count - ask.kept;
  answer_all(ask.participants, c);
}

void Coordinator::Impl::expire_backup_ask(std::uint64_t number) {
  const auto found = backup_asks.open.find(number);
  if (found == backup_asks.open.end()) return;
  stats.add(Counter::timed_out);
  const std::shared_ptr<BackupAsk> ask = found->second;
  end_backup_ask(*ask, Status::timed_out);
}

// The group is broken: nobody of it gets another answer.
void Coordinator::Impl::end_backup_asks(GroupSlot group) {
  std::vector<std::shared_ptr<BackupAsk>> lost;
  for (const auto& [number, ask] : backup_asks.open) {
    if (ask->group == group) lost.push_back(ask);
  }
  for (const auto& ask : lost) {
    stats.add(Counter::peer_lost);
    end_backup_ask(*ask, Status::peer_lost);
  }
}

}  // namespace hicache::daemon
