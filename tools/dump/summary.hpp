// Totals over the tables of a snapshot: what the default report shows.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "shm/page_word.hpp"
#include "tools/dump/index_walk.hpp"
#include "tools/dump/snapshot.hpp"

namespace hicache::inspect {

struct NamespaceUse {
  std::uint64_t pages = 0;  // that hold a slot
  std::uint64_t ready = 0;
  std::uint64_t bytes = 0;  // of the slots they hold: shards * shard_stride each
};

struct Summary {
  static constexpr std::size_t kChainBins = 9;  // 0, 1, ..., 7, longer

  std::array<std::uint64_t, kPageStateCount + 1> page_states{};  // last: invalid states
  std::uint64_t pins = 0;
  std::uint64_t dirty = 0;
  std::vector<NamespaceUse> namespaces;  // by NamespaceId
  std::uint64_t used_bytes = 0;          // of all slots in use
  std::uint64_t unknown_namespace = 0;   // pages in use without a valid namespace

  std::uint64_t segments_assigned = 0;
  // Assigned and all segments by NUMA node; one entry where no node matters.
  std::map<std::uint32_t, std::pair<std::uint64_t, std::uint64_t>> segments_by_node;
  std::uint64_t slots = 0;       // in assigned segments
  std::uint64_t used_slots = 0;  // as the segment table says

  std::uint64_t buckets_used = 0;
  std::uint64_t indexed_pages = 0;
  std::uint32_t longest_chain = 0;
  std::array<std::uint64_t, kChainBins> chain_lengths{};
  std::uint64_t broken_chains = 0;
};

Summary summarise(const ConstTables& t, const IndexWalk& walk);

}  // namespace hicache::inspect
