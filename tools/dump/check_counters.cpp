#include <algorithm>
#include <vector>

#include "shm/counters.hpp"
#include "shm/page_word.hpp"
#include "tools/dump/checker.hpp"

namespace hicache::inspect {
namespace {

// What the gauges must say, taken from the tables.
struct Totals {
  std::uint64_t resident = 0, ready = 0, pins = 0, leases = 0, used_bytes = 0, segments = 0;
  std::uint64_t attached = 0, last_use = 0;
  std::vector<std::uint64_t> by_namespace;
};

Totals add_up(const ConstTables& t) {
  Totals n;
  n.by_namespace.resize(t.namespaces.size());
  for (const PageEntry& page : t.pages) {
    const PageWord word = PageWord::decode(get(page.word));
    if (word.state == PageState::free) continue;
    ++n.resident;
    n.ready += word.readable() ? 1 : 0;
    n.last_use = std::max(n.last_use, get(page.last_use));
    if (get(page.namespace_id) < n.by_namespace.size()) ++n.by_namespace[get(page.namespace_id)];
  }
  for (const LeaseEntry& lease : t.leases) {
    if (get(lease.state) == static_cast<std::uint32_t>(LeaseState::free)) continue;
    ++n.leases;
    n.pins += get(lease.pins);
  }
  for (std::uint32_t i = 0; i < t.segments.size(); ++i) {
    const SegmentEntry& s = t.segments[i];
    if (get(s.size_class) == kNone32) continue;
    ++n.segments;
    if (get(s.span_head) == i) n.used_bytes += get(s.used_slots) * get(s.slot_bytes);
  }
  for (const ClientEntry& client : t.clients) {
    n.attached += get(client.state) == static_cast<std::uint32_t>(ClientState::attached) ? 1 : 0;
  }
  return n;
}

}  // namespace

void check_gauges(const CheckContext& c) {
  const Totals n = add_up(c.t);
  auto compare = [&](Counter counter, std::uint64_t expected) {
    const auto index = static_cast<std::uint32_t>(counter);
    const std::uint64_t value = get(c.t.counters[index]);
    if (value == expected) return;
    c.out.add({FindingKind::wrong_gauge, SectionKind::counters, index, 0,
               static_cast<std::int64_t>(value - expected)},
              Proof::gauge, "counter {} is {}, the tables say {}", counter_name(counter), value, expected);
  };
  compare(Counter::resident_pages, n.resident);
  compare(Counter::ready_pages, n.ready);
  compare(Counter::pinned_pages, n.pins);
  compare(Counter::live_leases, n.leases);
  compare(Counter::used_pool_bytes, n.used_bytes);
  compare(Counter::assigned_segments, n.segments);
  compare(Counter::attached_clients, n.attached);
  for (std::uint32_t i = 0; i < c.t.namespaces.size(); ++i) {
    if (c.used_namespace(i) == nullptr) continue;
    const std::uint64_t value = get(c.t.namespaces[i].resident_pages);
    if (value == n.by_namespace[i]) continue;
    c.out.add({FindingKind::wrong_gauge, SectionKind::namespaces, i, 0,
               static_cast<std::int64_t>(value - n.by_namespace[i])},
              Proof::gauge, "namespace {} counts {} resident pages, the page table has {}", i, value,
              n.by_namespace[i]);
  }
  if (n.last_use > get(c.t.header->use_clock)) {
    c.out.add({FindingKind::wrong_gauge, SectionKind::pages, 0, 0, 0}, Proof::gauge,
              "a page was last used at stamp {}, the use clock is at {}", n.last_use,
              get(c.t.header->use_clock));
  }
}

}  // namespace hicache::inspect
