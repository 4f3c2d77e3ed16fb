// How much of the pool each TP group has pinned, so that one that pins a lot leaves the others room.
//
// Thread safety: none; the coordinator's own.
//
// A page that several groups pin is counted once, for the group that pinned it first: a prompt that everybody
// shares costs its bytes and no more. What is left of it when that group lets go stays its until the last pin
// goes.
#pragma once

#include <cstdint>
#include <vector>

#include "shm/types.hpp"

namespace hicache::daemon {

class PinShare {
 public:
  // `pages` and `groups` are the sizes of the tables.
  PinShare(std::size_t pages, std::size_t groups) : owners_(pages), pinned_(groups) {}

  // The page has its first pin; it costs `bytes`. Precondition: it had none.
  void pin(PageId page, GroupSlot group, std::uint64_t bytes) {
    owners_[page.value] = Owner{group, bytes};
    pinned_[group.value] += bytes;
    total_ += bytes;
  }
  // The page has lost its last pin.
  void unpin(PageId page) {
    Owner& owner = owners_[page.value];
    if (!owner.group) return;
    pinned_[owner.group.value] -= owner.bytes;
    total_ -= owner.bytes;
    owner = Owner{};
  }
  [[nodiscard]] std::uint64_t pinned_bytes(GroupSlot group) const { return pinned_[group.value]; }
  [[nodiscard]] std::uint64_t total_bytes() const { return total_; }

  // Bytes that `group` may still pin of `pool_bytes` when each of the `active` groups (it is one of them) can
  // be sure of `guaranteed` bytes: what is free, less what the others have not used of theirs, and never less
  // than the rest of its own.
  [[nodiscard]] std::uint64_t room(GroupSlot group, const std::vector<GroupSlot>& active,
                                   std::uint64_t pool_bytes, std::uint64_t guaranteed) const {
    std::uint64_t taken = total_;
    for (const GroupSlot other : active) {
      if (other != group && pinned_bytes(other) < guaranteed) taken += guaranteed - pinned_bytes(other);
    }
    const std::uint64_t own = pinned_bytes(group) < guaranteed ? guaranteed - pinned_bytes(group) : 0;
    const std::uint64_t left = taken < pool_bytes ? pool_bytes - taken : 0;
    return left > own ? left : own;
  }

 private:
  struct Owner {
    GroupSlot group;  // none = the page has no pins
    std::uint64_t bytes = 0;
  };
  std::vector<Owner> owners_;  // by page
  std::vector<std::uint64_t> pinned_;
  std::uint64_t total_ = 0;
};

}  // namespace hicache::daemon
