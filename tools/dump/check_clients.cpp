#include <bit>
#include <vector>

#include "shm/protocol.hpp"
#include "tools/dump/checker.hpp"

namespace hicache::inspect {
namespace {

FindingId client_id(FindingKind kind, std::uint32_t slot, const ClientEntry& e, std::int64_t which) {
  return {kind, SectionKind::clients, slot, get(e.generation), which};
}

// Free-running counters: the signed distance is right across the wrap. `lag`: how far the mirrored tail may
// be behind.
void check_ring(const CheckContext& c, std::uint32_t slot, const char* ring, std::uint32_t head,
                std::uint32_t tail, std::uint32_t entries, std::uint32_t lag, std::int64_t which) {
  const auto distance = static_cast<std::int32_t>(tail - head);
  if (distance >= -static_cast<std::int32_t>(lag) && distance <= static_cast<std::int32_t>(entries)) return;
  c.out.add(client_id(FindingKind::ring_position, slot, c.t.clients[slot], which), Proof::count,
            "client {}: {} ring has head {} and tail {}, {} entries apart, expected at most {}", slot, ring,
            head, tail, distance, entries);
}

void check_references(const CheckContext& c, std::uint32_t slot) {
  const ClientEntry& e = c.t.clients[slot];
  const std::uint32_t ns = get(e.namespace_id);
  if (c.used_namespace(ns) == nullptr) {
    c.out.add(client_id(FindingKind::unknown_namespace, slot, e, 0), Proof::structure,
              "client {} is attached to namespace {}, which is not in use", slot, ns);
  }
  const std::uint32_t group = get(e.group);
  if (group >= c.t.groups.size() ||
      get(c.t.groups[group].state) == static_cast<std::uint32_t>(GroupState::free)) {
    c.out.add(client_id(FindingKind::broken_client, slot, e, 1), Proof::structure,
              "client {} belongs to group {}, which is not in use", slot, group);
    return;
  }
  const GroupEntry& g = c.t.groups[group];
  if (!c.same_lineage(get(g.namespace_id), ns)) {
    c.out.add(client_id(FindingKind::broken_client, slot, e, 2), Proof::structure,
              "client {} is in namespace {}, its group {} in namespace {}", slot, ns, group,
              get(g.namespace_id));
  }
  const std::uint32_t rank = get(e.tp_rank);
  if (get(e.role) == static_cast<std::uint32_t>(Role::rank)) {
    if (rank >= get(g.tp_size) || rank >= kMaxTpSize) {
      c.out.add(client_id(FindingKind::broken_client, slot, e, 3), Proof::structure,
                "client {} is rank {} of group {}, which has {} ranks", slot, rank, group, get(g.tp_size));
    } else if (((get(g.members_attached) >> rank) & 1) == 0) {
      c.out.add(client_id(FindingKind::broken_client, slot, e, 4), Proof::structure,
                "client {} is rank {} of group {}, but the group does not count it as attached", slot, rank,
                group);
    }
  } else if (get(g.scheduler) != slot) {
    c.out.add(client_id(FindingKind::broken_client, slot, e, 5), Proof::structure,
              "client {} is scheduler of group {}, but the group names client {}", slot, group,
              static_cast<std::int32_t>(get(g.scheduler)));
  }
}

}  // namespace

void check_clients(const CheckContext& c) {
  for (std::uint32_t slot = 0; slot < c.t.clients.size(); ++slot) {
    const ClientEntry& e = c.t.clients[slot];
    const std::uint32_t state = get(e.state);
    if (state == static_cast<std::uint32_t>(ClientState::free)) continue;
    if (state > static_cast<std::uint32_t>(ClientState::dying)) {
      c.out.add(client_id(FindingKind::wrong_state, slot, e, 0), Proof::structure,
                "client {} has state {}, expected 0 to 2", slot, state);
      continue;
    }
    const std::uint32_t role = get(e.role);
    if (role != static_cast<std::uint32_t>(Role::rank) &&
        role != static_cast<std::uint32_t>(Role::scheduler)) {
      c.out.add(client_id(FindingKind::broken_client, slot, e, 6), Proof::structure,
                "client {} has role {}, expected rank or scheduler", slot, role);
      continue;
    }
    // Whoever is dying has left its group and namespace: these may be gone before its last copy has ended.
    if (state == static_cast<std::uint32_t>(ClientState::dying)) continue;
    check_references(c, slot);
    // A client publishes an entry before its tail: the daemon may have taken entries that the tail does not
    // show yet.
    const std::uint32_t submissions = c.config.submission_entries;
    check_ring(c, slot, "submission", get(e.sq_head), get(e.sq_tail_seen), submissions, submissions, 1);
    check_ring(c, slot, "completion", get(e.cq_head_seen), get(e.cq_tail), c.config.completion_entries, 0, 2);
  }
}

void check_groups(const CheckContext& c) {
  std::vector<std::uint64_t> present(c.t.groups.size());  // ranks that a client entry stands for
  std::vector<std::uint32_t> leases(c.t.groups.size());
  for (std::uint32_t slot = 0; slot < c.t.clients.size(); ++slot) {
    const ClientEntry& e = c.t.clients[slot];
    const std::uint32_t group = get(e.group);
    const std::uint32_t rank = get(e.tp_rank);
    // A dying client has left its group, whose slot may have its next user.
    if (get(e.state) != static_cast<std::uint32_t>(ClientState::attached) || group >= present.size())
      continue;
    if (get(e.role) != static_cast<std::uint32_t>(Role::rank) || rank >= kMaxTpSize) continue;
    if (((present[group] >> rank) & 1) != 0) {
      c.out.add(client_id(FindingKind::broken_client, slot, e, 7), Proof::structure,
                "client {} is rank {} of group {}, and so is another client", slot, rank, group);
    }
    present[group] |= 1ull << rank;
  }
  for (const LeaseEntry& lease : c.t.leases) {
    const std::uint32_t group = get(lease.group);
    if (get(lease.state) != static_cast<std::uint32_t>(LeaseState::free) && group < leases.size())
      ++leases[group];
  }
  for (std::uint32_t slot = 0; slot < c.t.groups.size(); ++slot) {
    const GroupEntry& g = c.t.groups[slot];
    const std::uint32_t state = get(g.state);
    auto id = [&](FindingKind kind, std::int64_t which) {
      return FindingId{kind, SectionKind::groups, slot, get(g.generation), which};
    };
    if (state == static_cast<std::uint32_t>(GroupState::free)) continue;
    if (state > static_cast<std::uint32_t>(GroupState::broken)) {
      c.out.add(id(FindingKind::wrong_state, 0), Proof::structure, "group {} has state {}, expected 0 to 2",
                slot, state);
      continue;
    }
    if (c.used_namespace(get(g.namespace_id)) == nullptr) {
      c.out.add(id(FindingKind::unknown_namespace, 0), Proof::structure,
                "group {} is in namespace {}, which is not in use", slot, get(g.namespace_id));
    }
    const std::uint32_t tp_size = get(g.tp_size);
    const std::uint64_t members = get(g.members_attached);
    if (tp_size == 0 || tp_size > kMaxTpSize) {
      c.out.add(id(FindingKind::broken_group, 1), Proof::structure, "group {} has {} ranks, expected 1 to {}",
                slot, tp_size, +kMaxTpSize);
    } else if ((members >> tp_size) != 0) {
      c.out.add(id(FindingKind::broken_group, 2), Proof::structure, "group {} has {} ranks but members {:#x}",
                slot, tp_size, members);
    }
    if ((members & ~present[slot]) != 0) {
      c.out.add(id(FindingKind::broken_group, 3), Proof::structure,
                "group {} counts rank {} as attached, but no client is that rank", slot,
                std::countr_zero(members & ~present[slot]));
    }
    const std::uint32_t scheduler = get(g.scheduler);
    if (scheduler != kNone32 &&
        (scheduler >= c.t.clients.size() || get(c.t.clients[scheduler].group) != slot ||
         get(c.t.clients[scheduler].state) == static_cast<std::uint32_t>(ClientState::free))) {
      c.out.add(id(FindingKind::broken_group, 4), Proof::structure,
                "group {} names client {} as its scheduler, which is not attached to it", slot, scheduler);
    }
    const std::int64_t difference = std::int64_t{get(g.leases)} - leases[slot];
    if (difference != 0) {
      c.out.add(id(FindingKind::wrong_count, difference), Proof::count,
                "group {} counts {} leases, the lease table has {}", slot, get(g.leases), leases[slot]);
    }
  }
}

}  // namespace hicache::inspect
