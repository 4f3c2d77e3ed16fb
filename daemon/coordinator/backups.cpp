// Backups: pages that go to storage, chosen by policy when they become ready, are used, or are about to be
// evicted. Storage never holds anybody up here: what does not fit the queue is dropped and counted.
#include <algorithm>
#include <cassert>
#include <utility>

#include "daemon/coordinator/coordinator_impl.hpp"
#include "shm/crash_points.hpp"

namespace hicache::daemon {

bool Coordinator::Impl::backs_up(BackupPolicy by) const {
  return config.storage.backup_policy == by && storage_attached();
}

// A page has become ready.
void Coordinator::Impl::offer_backup(PageId page, GroupSlot group) {
  backups.queued[page.value] = false;  // what an earlier page of this id left behind
  const bool asked = asked_about(page);
  const bool dirty = pages.dirty(page);
  const bool wanted = backs_up(BackupPolicy::write_through) ||
                      (asked && storage_attached() && config.storage.backup_policy != BackupPolicy::none);
  if (wanted && dirty) return add_candidate(page, group.value);
  if (asked) tell_asking(page, pages.word(page).generation, !dirty);
}

void Coordinator::Impl::add_candidate(PageId page, std::uint32_t owner) {
  // A page that must not be evicted before it is stored is held from now on, and not only while it is read.
  const bool storing = config.storage.backup_policy == BackupPolicy::write_back ||
                       config.storage.dirty_eviction == DirtyEviction::write_back;
  if (storing) pages.set_storing(page, true);
  backups.queued[page.value] = true;
  backups.candidates.push_back({{page, pages.word(page).generation, storing}, owner});
}

// A request has ended: its pages were used once more. Also what could not be backed up before gets another
// try.
void Coordinator::Impl::offer_used_pages(const Lease& lease) {
  const bool selective = backs_up(BackupPolicy::write_through_selective);
  if (!selective && !backs_up(BackupPolicy::write_through)) return;
  for (const PageId page : lease.pages) {
    if (!page || pages.state(page) != PageState::ready || !pages.dirty(page)) continue;
    if (pages.storing(page) || backups.queued[page.value]) continue;
    if (selective && pages.uses(page) < config.storage.backup_uses) continue;
    add_candidate(page, lease.group.value);
  }
}

// Eviction is about to take the page. True when it is written back first and can't be evicted until then.
bool Coordinator::Impl::write_back(PageId page, EvictReason why) {
  const BackupPolicy by = config.storage.backup_policy;
  const bool spared = config.storage.dirty_eviction == DirtyEviction::write_back && by != BackupPolicy::none;
  const bool in_background = why == EvictReason::watermark && by == BackupPolicy::write_back;
  if ((!spared && !in_background) || !storage_attached()) return false;
  if (!pages.dirty(page) || backups.queued[page.value]) return false;
  if (backups.waiting_pages + backups.candidates.size() >= config.storage.backup_queue_pages) return false;
  add_candidate(page, 0);
  return true;
}

// Makes operations of this turn's candidates and sends what may go.
void Coordinator::Impl::start_backups() {
  if (storage != nullptr) {
    const auto state = static_cast<std::uint64_t>(storage->state());
    const auto suspended = static_cast<std::uint64_t>(StorageState::suspended);
    const std::uint64_t before = stats.get(Counter::storage_state);
    if (state != before) stats.set(Counter::storage_state, state);
    if (state == suspended && before != suspended) stats.add(Counter::storage_suspensions);
  }
  if (!backups.idle()) {
    const auto scope = commit();
    queue_candidates();
    if (!storage_attached()) drop_waiting_backups(Counter::backup_no_storage);
    while (!backups.waiting.empty() && backups.running.size() < config.storage.write_batches) {
      BackupOperation operation = backups.waiting.pop();
      backups.waiting_pages -= static_cast<std::uint32_t>(operation.pages.size());
      const std::uint64_t number = operation.number;
      send_next_batch(backups.running.emplace(number, std::move(operation)).first->second);
    }
    stats.set(Counter::backup_queue_pages, backups.waiting_pages);
  }
  if (!backups.idle() || backup_waiters.empty()) return;
  for (auto& answer : std::exchange(backup_waiters, {})) answer(Status::ok, "{\"backups\":0}");
}

void Coordinator::Impl::queue_candidates() {
  BackupOperation operation;
  const auto flush = [&] {
    if (operation.pages.empty()) return;
    operation.number = ++next_number;
    stats.add(Counter::backups);
    backups.waiting_pages += static_cast<std::uint32_t>(operation.pages.size());
    backups.waiting.push(operation.owner, std::exchange(operation, {}));
  };
  for (const Backups::Candidate& candidate : std::exchange(backups.candidates, {})) {
    const BackupPage& one = candidate.page;
    if (!still_there(one)) {
      drop_backup(one, Counter::backup_gone);
      continue;
    }
    const NamespaceId ns = pages.namespace_of(one.page);
    if (candidate.owner != operation.owner || ns != operation.ns) flush();
    // A namespace whose ingredients are not known yet, after a restart, has no keys in storage either.
    const bool full = backups.waiting_pages + operation.pages.size() >= config.storage.backup_queue_pages;
    if (full || !namespaces.get(ns).spec_known) {
      drop_backup(one, Counter::backup_full);
      continue;
    }
    operation.owner = candidate.owner;
    operation.ns = ns;
    operation.pages.push_back(one);
  }
  flush();
}

bool Coordinator::Impl::still_there(const BackupPage& one) const {
  const PageWord word = pages.word(one.page);
  return word.generation == one.generation && word.state == PageState::ready;
}

void Coordinator::Impl::drop_backup(const BackupPage& one, Counter why) {
  stats.add(why);
  if (pages.word(one.page).generation == one.generation) backups.queued[one.page.value] = false;
  tell_asking(one.page, one.generation, false);
  if (!one.storing) return;
  const NamespaceId ns = pages.namespace_of(one.page);
  pages.set_storing(one.page, false);
  if (namespaces.retired(ns)) evict_namespace(ns);  // it was held while its namespace went
}

// Sends the next pages of an operation that are still what they were, or ends it.
void Coordinator::Impl::send_next_batch(BackupOperation& operation) {
  StorageWork work;
  work.number = operation.number;
  std::vector<PrefixHash> hashes;
  while (operation.next < operation.pages.size() && hashes.size() < kStorageBatchPages) {
    const BackupPage& one = operation.pages[operation.next++];
    if (!still_there(one)) {
      drop_backup(one, Counter::backup_gone);
      continue;
    }
    backups.queued[one.page.value] = false;
    if (!one.storing) pages.set_storing(one.page, true);
    work.pages.push_back(one.page);
    hashes.push_back(load_key(tables.pages[one.page.value]));
  }
  if (hashes.empty()) return end_backup(operation.number, Counter::backup_gone);
  HICACHE_CRASH_POINT(backup_marked);
  send_to_storage(StorageOperation::put, operation.ns, operation.owner, std::move(hashes), std::move(work));
}

void Coordinator::Impl::end_backup(std::uint64_t number, Counter why_not_the_rest) {
  const auto found = backups.running.find(number);
  assert(found != backups.running.end());
  BackupOperation& operation = found->second;
  for (; operation.next < operation.pages.size(); ++operation.next) {
    drop_backup(operation.pages[operation.next], why_not_the_rest);
  }
  HICACHE_CRASH_POINT(backup_done);
  stats.add(Counter::backups_ended);
  backups.running.erase(found);
}

void Coordinator::Impl::drop_waiting_backups(Counter why) {
  while (!backups.waiting.empty()) {
    BackupOperation operation = backups.waiting.pop();
    const std::uint64_t number = operation.number;
    backups.running.emplace(number, std::move(operation));
    end_backup(number, why);
  }
  backups.waiting_pages = 0;
}

}  // namespace hicache::daemon
