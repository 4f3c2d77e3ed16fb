#include <bit>
#include <vector>

#include "shm/page_word.hpp"
#include "shm/protocol.hpp"
#include "tools/dump/checker.hpp"

namespace hicache::inspect {
namespace {

FindingId lease_id(const CheckContext& c, FindingKind kind, std::uint32_t lease, std::int64_t which) {
  return {kind, SectionKind::leases, lease, get(c.t.leases[lease].generation), which};
}

struct GroupMembers {
  std::uint64_t ranks = 0;  // ranks with a client entry; a dying client's last copies still hold its leases
  bool scheduler = false;
};

std::vector<GroupMembers> members_by_group(const CheckContext& c) {
  std::vector<GroupMembers> members(c.t.groups.size());
  for (const ClientEntry& e : c.t.clients) {
    const std::uint32_t group = get(e.group);
    if (get(e.state) == static_cast<std::uint32_t>(ClientState::free) || group >= members.size()) continue;
    if (get(e.role) == static_cast<std::uint32_t>(Role::scheduler))
      members[group].scheduler = true;
    else if (get(e.tp_rank) < kMaxTpSize)
      members[group].ranks |= 1ull << get(e.tp_rank);
  }
  return members;
}

void check_owner(const CheckContext& c, std::uint32_t i, const std::vector<GroupMembers>& members) {
  const LeaseEntry& e = c.t.leases[i];
  const std::uint32_t group = get(e.group);
  if (group >= members.size() ||
      get(c.t.groups[group].state) == static_cast<std::uint32_t>(GroupState::free)) {
    c.out.add(lease_id(c, FindingKind::pin_without_owner, i, 1), Proof::structure,
              "lease {} holds {} pins for group {}, which is not in use", i, get(e.pins), group);
    return;
  }
  if (!c.same_lineage(get(c.t.groups[group].namespace_id), get(e.namespace_id))) {
    c.out.add(lease_id(c, FindingKind::broken_lease, i, 1), Proof::structure,
              "lease {} is in namespace {}, its group {} in namespace {}", i, get(e.namespace_id), group,
              get(c.t.groups[group].namespace_id));
  }
  std::uint64_t owners = members[group].ranks;
  if (members[group].scheduler) owners |= 1ull << kSchedulerHolderBit;
  if (owners == 0) {
    c.out.add(lease_id(c, FindingKind::pin_without_owner, i, 3), Proof::structure,
              "lease {} holds {} pins for group {}, which has no client any more", i, get(e.pins), group);
    return;
  }
  const std::uint64_t gone = get(e.holders) & ~owners;
  if (gone != 0) {
    const int bit = std::countr_zero(gone);
    c.out.add(lease_id(c, FindingKind::pin_without_owner, i, 2), Proof::structure,
              "lease {} holds {} pins for {} {} of group {}, but no such client is attached", i, get(e.pins),
              bit == static_cast<int>(kSchedulerHolderBit) ? "holder bit" : "rank", bit, group);
  }
}

// Walks the lease's chunks; returns the pins in them. `taken` marks chunks already walked.
std::uint64_t check_chunks(const CheckContext& c, std::uint32_t i, std::vector<bool>& taken,
                           std::vector<std::uint32_t>& pins) {
  const LeaseEntry& e = c.t.leases[i];
  std::uint64_t total = 0;
  std::uint32_t id = get(e.first_chunk);
  while (id != kNone32) {
    if (id >= c.t.pin_chunks.size()) {
      c.out.add(lease_id(c, FindingKind::broken_lease, i, 2), Proof::structure,
                "lease {} leads to chunk {} of {}", i, id, c.t.pin_chunks.size());
      return total;
    }
    if (taken[id]) {
      c.out.add(lease_id(c, FindingKind::broken_lease, i, 3), Proof::structure,
                "lease {} leads to chunk {}, which is in a lease's list already", i, id);
      return total;
    }
    taken[id] = true;
    const PinChunk& chunk = c.t.pin_chunks[id];
    if (get(chunk.lease) != i) {
      c.out.add(lease_id(c, FindingKind::broken_lease, i, 4), Proof::structure,
                "lease {} leads to chunk {}, which says it belongs to lease {}", i, id, get(chunk.lease));
      return total;
    }
    std::uint32_t count = get(chunk.count);
    if (count > PinChunk::kPages) {
      c.out.add(lease_id(c, FindingKind::broken_lease, i, 5), Proof::structure,
                "chunk {} of lease {} counts {} pages, it has room for {}", id, i, count, +PinChunk::kPages);
      count = PinChunk::kPages;
    }
    for (std::uint32_t k = 0; k < count; ++k) {
      const std::uint32_t page = get(chunk.pages[k]);
      if (page >= pins.size()) {
        c.out.add(lease_id(c, FindingKind::broken_lease, i, 6), Proof::structure,
                  "lease {} pins page {} of {}", i, page, pins.size());
        continue;
      }
      ++pins[page];
      const bool page_free = PageWord::decode(get(c.t.pages[page].word)).state == PageState::free;
      if (!page_free && get(c.t.pages[page].namespace_id) != get(e.namespace_id)) {
        c.out.add(lease_id(c, FindingKind::broken_lease, i, 7), Proof::structure,
                  "lease {} of namespace {} pins page {} of namespace {}", i, get(e.namespace_id), page,
                  get(c.t.pages[page].namespace_id));
      }
    }
    total += count;
    id = get(chunk.next);
  }
  return total;
}

void check_lease(const CheckContext& c, std::uint32_t i, std::vector<bool>& taken,
                 std::vector<std::uint32_t>& pins, const std::vector<GroupMembers>& members) {
  const LeaseEntry& e = c.t.leases[i];
  const std::uint32_t state = get(e.state);
  if (state > static_cast<std::uint32_t>(LeaseState::closing)) {
    c.out.add(lease_id(c, FindingKind::wrong_state, i, 0), Proof::structure,
              "lease {} has state {}, expected 0 to 3", i, state);
  }
  if (c.used_namespace(get(e.namespace_id)) == nullptr) {
    c.out.add(lease_id(c, FindingKind::unknown_namespace, i, 0), Proof::structure,
              "lease {} is in namespace {}, which is not in use", i, get(e.namespace_id));
  }
  if (get(e.hits) > get(e.pages)) {
    c.out.add(lease_id(c, FindingKind::broken_lease, i, 8), Proof::structure,
              "lease {} has {} hits of {} pages", i, get(e.hits), get(e.pages));
  }
  check_owner(c, i, members);
  const std::uint64_t total = check_chunks(c, i, taken, pins);
  const std::int64_t difference = std::int64_t{get(e.pins)} - static_cast<std::int64_t>(total);
  if (difference != 0) {
    c.out.add(lease_id(c, FindingKind::wrong_count, i, difference), Proof::count,
              "lease {} counts {} pins, its chunks hold {}", i, get(e.pins), total);
  }
}

}  // namespace

void check_leases(const CheckContext& c) {
  const std::vector<GroupMembers> members = members_by_group(c);
  std::vector<bool> taken(c.t.pin_chunks.size());
  std::vector<std::uint32_t> pins(c.t.pages.size());
  for (std::uint32_t i = 0; i < c.t.leases.size(); ++i) {
    if (c.used_lease(i) != nullptr) check_lease(c, i, taken, pins, members);
  }
  for (std::uint32_t id = 0; id < c.t.pin_chunks.size(); ++id) {
    const std::uint32_t lease = get(c.t.pin_chunks[id].lease);
    if (lease == kNone32 || taken[id]) continue;
    c.out.add({FindingKind::pin_without_owner, SectionKind::pin_chunks, id, lease}, Proof::structure,
              "chunk {} with {} pins belongs to lease {}, which does not lead to it", id,
              get(c.t.pin_chunks[id].count), lease);
  }
  for (std::uint32_t page = 0; page < c.t.pages.size(); ++page) {
    const PageWord word = PageWord::decode(get(c.t.pages[page].word));
    const std::int64_t difference = std::int64_t{word.pins} - pins[page];
    if (difference == 0) continue;
    // Far from the differences of children counts, which share kind and table.
    constexpr std::int64_t kPinBase = std::int64_t{1} << 40;
    c.out.add(
        {FindingKind::wrong_count, SectionKind::pages, page, word.generation.value, kPinBase + difference},
        Proof::count, "page {} ({}) has {} pins, leases hold {}", page, to_string(word.state), word.pins,
        pins[page]);
  }
}

}  // namespace hicache::inspect
