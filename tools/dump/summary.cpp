#include "tools/dump/summary.hpp"

#include <algorithm>

namespace hicache::inspect {

Summary summarise(const ConstTables& t, const IndexWalk& walk) {
  Summary s;
  s.namespaces.resize(t.namespaces.size());
  for (const PageEntry& page : t.pages) {
    const PageWord word = PageWord::decode(get(page.word));
    ++s.page_states[std::min<std::size_t>(static_cast<std::size_t>(word.state), kPageStateCount)];
    if (word.state == PageState::free) continue;
    s.pins += word.pins;
    s.dirty += (word.flags & PageWord::kDirty) != 0 ? 1 : 0;
    const std::uint32_t ns = get(page.namespace_id);
    if (ns >= s.namespaces.size()) {
      ++s.unknown_namespace;
      continue;
    }
    NamespaceUse& use = s.namespaces[ns];
    ++use.pages;
    use.ready += word.readable() ? 1 : 0;
    use.bytes += get(t.namespaces[ns].slot_bytes);
    s.used_bytes += get(t.namespaces[ns].slot_bytes);
  }
  for (std::uint32_t i = 0; i < t.segments.size(); ++i) {
    const SegmentEntry& segment = t.segments[i];
    auto& [assigned, all] = s.segments_by_node[get(segment.numa_node)];
    ++all;
    if (get(segment.size_class) == kNone32) continue;
    ++assigned;
    ++s.segments_assigned;
    if (get(segment.span_head) != i) continue;
    s.slots += get(segment.slots);
    s.used_slots += get(segment.used_slots);
  }
  for (const IndexWalk::Chain& chain : walk.chains()) {
    s.buckets_used += chain.length > 0 ? 1 : 0;
    s.longest_chain = std::max(s.longest_chain, chain.length);
    ++s.chain_lengths[std::min<std::size_t>(chain.length, Summary::kChainBins - 1)];
    s.broken_chains += chain.end != ChainEnd::whole ? 1 : 0;
  }
  s.indexed_pages = walk.reachable();
  return s;
}

}  // namespace hicache::inspect
