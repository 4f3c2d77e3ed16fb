#include "daemon/coordinator/lease_table.hpp"
#include "shm/crash_points.hpp"

#include <cassert>

namespace hicache::daemon {
namespace {
constexpr auto kRelaxed = std::memory_order_relaxed;
}

LeaseTable::LeaseTable(const Tables& tables, PageTable& pages, Stats& stats)
    : entries_(tables.leases),
      chunks_(tables.pin_chunks),
      pages_(pages),
      stats_(stats),
      share_(tables.pages.size(), tables.groups.size()),
      leases_(tables.leases.size()) {
  for (std::uint32_t i = static_cast<std::uint32_t>(entries_.size()); i-- > 0;) {
    // Leases do not outlive a daemon; their generations do, so that no old id fits a new lease.
    LeaseEntry& e = entries_[i];
    e.state.store(static_cast<std::uint32_t>(LeaseState::free), kRelaxed);
    e.first_chunk.store(kNone32, kRelaxed);
    e.group.store(kNone32, kRelaxed);
    e.namespace_id.store(kNone32, kRelaxed);
    e.holders.store(0, kRelaxed);
    e.pages.store(0, kRelaxed);
    e.hits.store(0, kRelaxed);
    e.pins.store(0, kRelaxed);
    leases_[i].generation = Generation{e.generation.load(kRelaxed)};
    leases_[i].slot = LeaseSlot{i};
    free_leases_.push_back(i);
  }
  for (std::uint32_t i = static_cast<std::uint32_t>(chunks_.size()); i-- > 0;) {
    chunks_[i].next.store(kNone32, kRelaxed);
    chunks_[i].lease.store(kNone32, kRelaxed);
    chunks_[i].count.store(0, kRelaxed);
    free_chunks_.push_back(i);
  }
  stats_.set(Counter::live_leases, 0);
}

Lease* LeaseTable::open(GroupSlot group, NamespaceId ns, std::uint64_t sequence, std::uint64_t holders,
                        std::vector<PrefixHash> hashes) {
  if (free_leases_.empty()) return nullptr;
  const std::uint32_t slot = free_leases_.back();
  free_leases_.pop_back();
  Lease& lease = leases_[slot];
  // Generation 0 means "never used", and lease ids of 0 mean "none".
  lease.generation = Generation{lease.generation.value + 1 == 0 ? 1 : lease.generation.value + 1};
  lease.group = group;
  lease.namespace_id = ns;
  lease.sequence = sequence;
  lease.posted = 0;
  lease.holders = holders;
  lease.hashes = std::move(hashes);
  lease.pages.assign(lease.hashes.size(), PageId::none());
  lease.hits = 0;
  lease.writes.clear();
  lease.prefetch.reset();
  lease.backups.clear();
  lease.loads_in_flight = 0;
  lease.loads_failed = false;
  lease.counts_as_use = true;
  LeaseEntry& e = entries_[slot];
  e.generation.store(lease.generation.value, kRelaxed);
  e.group.store(group.value, kRelaxed);
  e.namespace_id.store(ns.value, kRelaxed);
  e.sequence.store(sequence, kRelaxed);
  e.holders.store(holders, kRelaxed);
  e.pages.store(static_cast<std::uint32_t>(lease.hashes.size()), kRelaxed);
  e.hits.store(0, kRelaxed);
  e.first_chunk.store(kNone32, kRelaxed);
  e.pins.store(0, kRelaxed);
  set_state(lease, LeaseState::live);
  stats_.add(Counter::live_leases);
  return &lease;
}

Result<Lease*> LeaseTable::find(LeaseId id) {
  if (id.slot().value >= leases_.size() || id.generation().value == 0) {
    return Error{Status::unknown_lease, "", 0};
  }
  Lease& lease = leases_[id.slot().value];
  if (lease.generation != id.generation() || lease.state == LeaseState::free) {
    // A generation that was never given out is no late message but an invention.
    const bool ahead = static_cast<std::int32_t>(id.generation().value - lease.generation.value) > 0;
    return Error{ahead ? Status::unknown_lease : Status::stale_generation, "", 0};
  }
  return &lease;
}

bool LeaseTable::can_pin(std::uint32_t count) const {
  return count / PinChunk::kPages + 1 < free_chunks_.size();
}

void LeaseTable::add_to_chunk(Lease& lease, PageId page) {
  LeaseEntry& e = entries_[lease.slot.value];
  std::uint32_t index = e.first_chunk.load(kRelaxed);
  if (index == kNone32 || chunks_[index].count.load(kRelaxed) == PinChunk::kPages) {
    assert(!free_chunks_.empty());
    const std::uint32_t fresh = free_chunks_.back();
    free_chunks_.pop_back();
    chunks_[fresh].lease.store(lease.slot.value, kRelaxed);
    chunks_[fresh].count.store(0, kRelaxed);
    chunks_[fresh].next.store(index, kRelaxed);
    e.first_chunk.store(fresh, kRelaxed);
    index = fresh;
  }
  PinChunk& chunk = chunks_[index];
  const std::uint32_t count = chunk.count.load(kRelaxed);
  chunk.pages[count].store(page.value, kRelaxed);
  chunk.count.store(count + 1, kRelaxed);
  bump(e.pins);
}

void LeaseTable::free_chunk(std::uint32_t index) {
  chunks_[index].lease.store(kNone32, kRelaxed);
  chunks_[index].count.store(0, kRelaxed);
  chunks_[index].next.store(kNone32, kRelaxed);
  free_chunks_.push_back(index);
}

void LeaseTable::remove_from_chunk(Lease& lease, PageId page) {
  LeaseEntry& e = entries_[lease.slot.value];
  const std::uint32_t newest = e.first_chunk.load(kRelaxed);
  for (std::uint32_t index = newest; index != kNone32; index = chunks_[index].next.load(kRelaxed)) {
    for (std::uint32_t i = 0; i < chunks_[index].count.load(kRelaxed); ++i) {
      if (chunks_[index].pages[i].load(kRelaxed) != page.value) continue;
      // Only the newest chunk may be part-full: its last page takes the gap.
      PinChunk& top = chunks_[newest];
      const std::uint32_t last = top.count.load(kRelaxed) - 1;
      chunks_[index].pages[i].store(top.pages[last].load(kRelaxed), kRelaxed);
      top.count.store(last, kRelaxed);
      if (last == 0) {
        e.first_chunk.store(top.next.load(kRelaxed), kRelaxed);
        free_chunk(newest);
      }
      lower(e.pins);
      return;
    }
  }
  assert(false && "a pinned page is in a chunk of its lease");
}

void LeaseTable::drop_pin(Lease& lease, std::uint32_t position) {
  const PageId page = lease.pages[position];
  assert(page);
  remove_from_chunk(lease, page);
  unpin(page);
  lease.pages[position] = PageId::none();
}

void LeaseTable::pin(Lease& lease, std::uint32_t position, PageId page) {
  assert(!lease.pages[position]);
  add_to_chunk(lease, page);
  const std::uint64_t bytes = pages_.pin_cost(page);
  pages_.pin(page);
  if (pages_.word(page).pins == 1) share_.pin(page, lease.group, bytes);
  lease.pages[position] = page;
}

void LeaseTable::unpin(PageId page) {
  pages_.unpin(page);
  if (pages_.word(page).pins == 0) share_.unpin(page);
}

void LeaseTable::set_state(Lease& lease, LeaseState state) {
  lease.state = state;
  entries_[lease.slot.value].state.store(static_cast<std::uint32_t>(state), kRelaxed);
}

void LeaseTable::set_holders(Lease& lease, std::uint64_t holders) {
  lease.holders = holders;
  entries_[lease.slot.value].holders.store(holders, kRelaxed);
}

void LeaseTable::set_hits(Lease& lease, std::uint32_t hits) {
  lease.hits = hits;
  entries_[lease.slot.value].hits.store(hits, kRelaxed);
}

void LeaseTable::stamp_all(Lease& lease) {
  for (std::size_t i = lease.pages.size(); i-- > 0;) {
    if (lease.pages[i]) pages_.stamp(lease.pages[i]);
  }
}

void LeaseTable::close(Lease& lease) {
  assert(lease.loads_in_flight == 0);
  LeaseEntry& e = entries_[lease.slot.value];
  for (std::size_t i = lease.pages.size(); i-- > 0;) {
    if (lease.pages[i]) unpin(lease.pages[i]);
  }
  HICACHE_CRASH_POINT(release_unpinned);
  for (std::uint32_t index = e.first_chunk.load(kRelaxed); index != kNone32;) {
    const std::uint32_t next = chunks_[index].next.load(kRelaxed);
    free_chunk(index);
    index = next;
  }
  e.first_chunk.store(kNone32, kRelaxed);
  e.pins.store(0, kRelaxed);
  e.pages.store(0, kRelaxed);
  e.hits.store(0, kRelaxed);
  e.holders.store(0, kRelaxed);
  e.group.store(kNone32, kRelaxed);
  e.namespace_id.store(kNone32, kRelaxed);
  // Entries are used again: what a huge request took is given back.
  std::vector<PrefixHash>().swap(lease.hashes);
  std::vector<PageId>().swap(lease.pages);
  lease.writes.clear();
  lease.prefetch.reset();
  lease.backups.clear();
  set_state(lease, LeaseState::free);
  stats_.sub(Counter::live_leases);
  free_leases_.push_back(lease.slot.value);
}

}  // namespace hicache::daemon
