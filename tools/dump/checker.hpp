// The invariants of the control region, proved over one snapshot. Split by table: check_<table>.cpp.
//
// Every check must hold up against any bytes: indexes are compared with the table's size before use, loops
// are bounded by table sizes.
#pragma once

#include <fmt/format.h>

#include <array>
#include <compare>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tools/dump/config_view.hpp"
#include "tools/dump/index_walk.hpp"
#include "tools/dump/snapshot.hpp"

namespace hicache::inspect {

// X(identifier, name in reports)
#define HICACHE_FINDINGS(X)                            \
  X(damaged_header, "damaged header")                  \
  X(wrong_state, "wrong state")                        \
  X(free_page_in_use, "free page in use")              \
  X(unknown_namespace, "unknown namespace")            \
  X(wrong_size_class, "wrong size class")              \
  X(duplicate_slot, "duplicate slot")                  \
  X(slot_out_of_place, "slot out of place")            \
  X(broken_segment, "broken segment")                  \
  X(orphan_in_index, "orphan in the index")            \
  X(missing_from_index, "page missing from the index") \
  X(wrong_bucket, "page in the wrong bucket")          \
  X(two_chains, "page in two chains")                  \
  X(cycle_in_chain, "cycle in a chain")                \
  X(link_out_of_range, "link out of range")            \
  X(half_made_change, "half-made index change")        \
  X(duplicate_key, "duplicate key")                    \
  X(broken_prefix, "broken prefix")                    \
  X(incomplete_page, "incomplete page")                \
  X(wrong_count, "wrong count")                        \
  X(pin_without_owner, "pin without an owner")         \
  X(broken_lease, "broken lease")                      \
  X(fill_without_lease, "fill without a lease")        \
  X(broken_client, "broken client")                    \
  X(broken_group, "broken group")                      \
  X(broken_namespace, "broken namespace")              \
  X(duplicate_namespace, "duplicate namespace")        \
  X(ring_position, "ring position")                    \
  X(wrong_gauge, "wrong gauge")

enum class FindingKind : std::uint32_t {
#define HICACHE_X(id, text) id,
  HICACHE_FINDINGS(HICACHE_X)
#undef HICACHE_X
      count_
};
constexpr std::size_t kFindingKinds = static_cast<std::size_t>(FindingKind::count_);
std::string_view to_string(FindingKind kind);

// What it takes to believe a finding in a region that changes while it is read.
enum class Proof : std::uint8_t {
  structure,  // the same entry, in the same generation, is wrong again and again
  count,      // the entry may live long while two numbers about it move: needs more repetitions
  gauge,      // two totals can only be compared within one moment of the coordinator
};

// What makes two findings of two snapshots the same.
struct FindingId {
  FindingKind kind = FindingKind::wrong_state;
  SectionKind table = SectionKind::none;
  std::uint32_t index = 0;
  std::uint32_t generation = 0;
  std::int64_t difference = 0;  // of counts; tells fields apart where one entry can be wrong in several ways
  friend auto operator<=>(const FindingId&, const FindingId&) = default;
};

struct Finding {
  FindingId id;
  Proof proof = Proof::structure;
  std::string text;  // a sentence that names the wrong value and what was expected
};

// Findings of one snapshot. Of each kind the first kPerKind are kept and the rest counted.
class Findings {
 public:
  static constexpr std::size_t kPerKind = 200;

  template <class... Args>
  void add(const FindingId& id, Proof proof, fmt::format_string<Args...> format, Args&&... args) {
    std::uint64_t& n = counts_[static_cast<std::size_t>(id.kind)];
    if (++n > kPerKind) return;
    list_.push_back(Finding{id, proof, fmt::format(format, std::forward<Args>(args)...)});
  }
  [[nodiscard]] const std::vector<Finding>& list() const { return list_; }
  // Findings that were counted but not kept.
  [[nodiscard]] std::uint64_t left_out() const;

 private:
  std::vector<Finding> list_;
  std::array<std::uint64_t, kFindingKinds> counts_{};
};

// What the checks share. Lives as long as the snapshot.
struct CheckContext {
  const ConstTables& t;
  const IndexWalk& walk;
  const ConfigView& config;
  Findings& out;

  // The namespace entry of an id from the region, or null when the id leads nowhere or to a free entry.
  [[nodiscard]] const NamespaceEntry* used_namespace(std::uint32_t id) const;
  // Both ids lead to namespaces that differ at most in their weights epoch: a bump moves a group, not its
  // leases.
  [[nodiscard]] bool same_lineage(std::uint32_t a, std::uint32_t b) const;
  // The lease entry of an id from the region, or null when it leads nowhere or to a free entry.
  [[nodiscard]] const LeaseEntry* used_lease(std::uint32_t id) const;
};

void check_namespaces(const CheckContext& c);
void check_clients(const CheckContext& c);
void check_groups(const CheckContext& c);
void check_pages(const CheckContext& c);
void check_prefixes(const CheckContext& c);
void check_index(const CheckContext& c);
void check_slots(const CheckContext& c);
void check_leases(const CheckContext& c);
// Totals against tables: only true within one moment of the coordinator.
void check_gauges(const CheckContext& c);

// All checks over a usable snapshot; header findings only over any other. `gauges` adds check_gauges.
Findings check_snapshot(const Snapshot& snapshot, bool gauges);

}  // namespace hicache::inspect
