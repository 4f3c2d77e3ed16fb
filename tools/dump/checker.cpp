#include "tools/dump/checker.hpp"

#include <algorithm>

namespace hicache::inspect {

std::string_view to_string(FindingKind kind) {
  static constexpr std::string_view kNames[] = {
#define HICACHE_X(id, text) text,
      HICACHE_FINDINGS(HICACHE_X)
#undef HICACHE_X
  };
  const auto i = static_cast<std::size_t>(kind);
  return i < kFindingKinds ? kNames[i] : "unknown finding";
}

std::uint64_t Findings::left_out() const {
  std::uint64_t n = 0;
  for (const std::uint64_t count : counts_) n += count - std::min<std::uint64_t>(count, kPerKind);
  return n;
}

const NamespaceEntry* CheckContext::used_namespace(std::uint32_t id) const {
  if (id >= t.namespaces.size()) return nullptr;
  const NamespaceEntry& e = t.namespaces[id];
  return get(e.state) == static_cast<std::uint32_t>(NamespaceState::free) ? nullptr : &e;
}

bool CheckContext::same_lineage(std::uint32_t a, std::uint32_t b) const {
  if (a == b) return true;
  const NamespaceEntry* first = used_namespace(a);
  const NamespaceEntry* second = used_namespace(b);
  if (first == nullptr || second == nullptr) return false;
  for (std::size_t i = 0; i < 4; ++i) {
    if (get(first->base_digest[i]) != get(second->base_digest[i])) return false;
  }
  return true;
}

const LeaseEntry* CheckContext::used_lease(std::uint32_t id) const {
  if (id >= t.leases.size()) return nullptr;
  const LeaseEntry& e = t.leases[id];
  return get(e.state) == static_cast<std::uint32_t>(LeaseState::free) ? nullptr : &e;
}

Findings check_snapshot(const Snapshot& snapshot, bool gauges) {
  Findings out;
  std::uint32_t n = 0;
  for (const std::string& sentence : snapshot.header_findings()) {
    out.add({FindingKind::damaged_header, SectionKind::none, n++}, Proof::structure, "{}",
            printable(sentence));
  }
  if (!snapshot.usable()) return out;

  const IndexWalk walk(snapshot.tables());
  const ConfigView config = view_config(snapshot.tables());
  const CheckContext c{snapshot.tables(), walk, config, out};
  check_namespaces(c);
  check_clients(c);
  check_groups(c);
  check_pages(c);
  check_prefixes(c);
  check_index(c);
  check_slots(c);
  check_leases(c);
  if (gauges) check_gauges(c);
  return out;
}

}  // namespace hicache::inspect
