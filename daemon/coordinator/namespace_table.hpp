// Namespaces: one entry per digest. A namespace stays while it has pages, or a group or lease holds it; a
// bump of its weights epoch retires it and makes a successor that clients follow by themselves.
//
// Thread safety: none; the coordinator's own.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "daemon/coordinator/slot_allocator.hpp"
#include "shm/namespace_spec.hpp"
#include "shm/region.hpp"

namespace hicache::daemon {

// A namespace in private memory, beside its entry in the control region.
struct Namespace {
  NamespaceId id;
  NamespaceSpec spec;  // with the weights epoch in force
  PrefixHash digest;
  PrefixHash base_digest;
  SizeClassId size_class;
  bool spec_known =
      true;  // false after a takeover, until an engine brings the spec that the digest stands for
};

class NamespaceTable {
 public:
  // `sound`: entries of an earlier daemon to take over, by NamespaceId; nullptr = start empty.
  NamespaceTable(std::span<NamespaceEntry> entries, SlotAllocator& slots,
                 const std::vector<bool>* sound = nullptr);

  // The namespace of a spec, made on first use. The weights epoch in force is the spec's plus the bumps of
  // this daemon. again when the table is full, too_large when a page of it does not fit the pool.
  Result<NamespaceId> find_or_create(NamespaceSpec spec);
  [[nodiscard]] const Namespace& get(NamespaceId id) const { return *namespaces_[id.value]; }
  [[nodiscard]] bool known(NamespaceId id) const {
    return id.value < namespaces_.size() && namespaces_[id.value].has_value();
  }
  [[nodiscard]] NamespaceEntry& entry(NamespaceId id) { return entries_[id.value]; }
  [[nodiscard]] bool retired(NamespaceId id) const {
    return entries_[id.value].state.load(std::memory_order_relaxed) ==
           static_cast<std::uint32_t>(NamespaceState::retired);
  }

  // Retires every active namespace whose base digest starts with `hex_prefix` (at least 8 digits) and makes
  // its successor with the next weights epoch. Returns the retired ones; not_found when none matches. When
  // the table has no room for a successor nothing changes (again).
  Result<std::vector<NamespaceId>> bump(const std::string& hex_prefix);

  // A group or a lease uses the namespace: it must not be freed, whether it has pages or not.
  void hold(NamespaceId id) {
    ++holds_[id.value];
    last_held_[id.value] = ++holds_ever_;
  }
  void drop(NamespaceId id);

  // Of the active namespaces that nobody holds, the one that was held longest ago; none of those that must
  // stay because of their bumps.
  [[nodiscard]] std::optional<NamespaceId> longest_idle() const;
  // Nothing of it is found any more; it goes with its last page. Precondition: active, and nobody holds it.
  void retire(NamespaceId id);

  // Frees entries that nobody holds and that have no pages: retired ones always, active ones when room is
  // needed. The last one that knows of a model's bumps stays.
  void collect(bool active_too);

 private:
  struct HashLess {
    bool operator()(const PrefixHash& a, const PrefixHash& b) const { return a.words < b.words; }
  };
  [[nodiscard]] std::optional<NamespaceId> free_entry();
  void take_over(NamespaceId id);
  // True when the entry has the geometry of the spec, which its digest promises.
  [[nodiscard]] bool agrees(NamespaceId id, const NamespaceSpec& spec) const;
  // Nothing else in the region tells a next daemon of the bumps of this model: without them it would find
  // pages of the old weights in storage.
  [[nodiscard]] bool last_to_know_bumps(NamespaceId id) const;
  void free(NamespaceId id);

  std::span<NamespaceEntry> entries_;
  SlotAllocator& slots_;
  std::vector<std::optional<Namespace>> namespaces_;
  std::vector<std::uint32_t> holds_;
  std::vector<std::uint64_t> last_held_;  // when, as a number of holds; 0 = not by this daemon
  std::uint64_t holds_ever_ = 0;
  std::map<PrefixHash, std::uint64_t, HashLess> bumps_;  // by base digest
};

}  // namespace hicache::daemon
