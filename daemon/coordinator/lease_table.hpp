// Leases: which pages a request of a group holds. Pins in page words are made and undone only through here,
// so that every pin has an owner that can be found after a death.
//
// Thread safety: none; the coordinator's own.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "daemon/coordinator/backup_ask.hpp"
#include "daemon/coordinator/group_write.hpp"
#include "daemon/coordinator/page_table.hpp"
#include "daemon/coordinator/pin_share.hpp"
#include "daemon/coordinator/prefetch.hpp"
#include "shm/region.hpp"

namespace hicache::daemon {

// A lease in private memory, beside its entry in the control region.
struct Lease {
  LeaseSlot slot;
  Generation generation;
  GroupSlot group;
  NamespaceId namespace_id;
  std::uint64_t sequence = 0;
  LeaseState state = LeaseState::free;
  std::uint64_t posted = 0;   // ranks that have posted the reserve
  std::uint64_t holders = 0;  // ranks (and scheduler) that have not released
  std::vector<PrefixHash> hashes;
  std::vector<PageId> pages;  // by position in the request; none = not pinned by this lease
  std::uint32_t hits = 0;
  std::uint32_t present = 0;  // leading pages that were ready; more than hits where the rest lacks states
  std::vector<std::unique_ptr<GroupWrite>> writes;
  std::unique_ptr<Prefetch> prefetch;
  std::vector<std::shared_ptr<BackupAsk>> backups;  // what its group has asked, for ranks that come late
  std::uint32_t loads_in_flight = 0;
  bool loads_failed = false;  // a rank's load did not end well
  bool counts_as_use = true;  // false once the group broke or diverged: its request was not one

  [[nodiscard]] LeaseId id() const { return LeaseId{slot, generation}; }
  [[nodiscard]] bool poisoned() const { return state == LeaseState::poisoned; }
};

class LeaseTable {
 public:
  LeaseTable(const Tables& tables, PageTable& pages, Stats& stats);

  // Opens a lease without pins; nullptr when the table is full.
  Lease* open(GroupSlot group, NamespaceId ns, std::uint64_t sequence, std::uint64_t holders,
              std::vector<PrefixHash> hashes);
  // The live lease of this id, or why not: unknown_lease, stale_generation.
  Result<Lease*> find(LeaseId id);

  // Room for `count` more pins?
  [[nodiscard]] bool can_pin(std::uint32_t count) const;
  // Pins a page at a position of the request. Precondition: nothing is pinned there and can_pin.
  void pin(Lease& lease, std::uint32_t position, PageId page);
  // Undoes one pin before the lease ends. Precondition: something is pinned there.
  void drop_pin(Lease& lease, std::uint32_t position);
  // What each group has pinned.
  [[nodiscard]] const PinShare& share() const { return share_; }
  void set_state(Lease& lease, LeaseState state);
  void set_holders(Lease& lease, std::uint64_t holders);
  void set_hits(Lease& lease, std::uint32_t hits);
  // Gives every pinned page a use stamp, last position first: a request is one use.
  void stamp_all(Lease& lease);
  // Unpins everything and closes the lease. Precondition: no operation of it is in flight.
  void close(Lease& lease);

  template <class Visit>
  void for_each_live(Visit&& visit) {
    for (auto& lease : leases_) {
      if (lease.state != LeaseState::free) visit(lease);
    }
  }

 private:
  void unpin(PageId page);
  void add_to_chunk(Lease& lease, PageId page);
  void remove_from_chunk(Lease& lease, PageId page);
  void free_chunk(std::uint32_t index);

  std::span<LeaseEntry> entries_;
  std::span<PinChunk> chunks_;
  PageTable& pages_;
  Stats& stats_;
  PinShare share_;
  std::vector<Lease> leases_;
  std::vector<std::uint32_t> free_leases_;
  std::vector<std::uint32_t> free_chunks_;
};

}  // namespace hicache::daemon
