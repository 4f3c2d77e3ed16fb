#include "tools/dump/index_walk.hpp"

#include "tools/dump/snapshot.hpp"

namespace hicache::inspect {

IndexWalk::IndexWalk(const ConstTables& tables)
    : chains_(tables.index.size()), owner_(tables.pages.size(), kNone32) {
  for (std::uint32_t bucket = 0; bucket < chains_.size(); ++bucket) {
    Chain& chain = chains_[bucket];
    chain.first = static_cast<std::uint32_t>(ids_.size());
    auto id = static_cast<std::uint32_t>(get(tables.index[bucket].head));
    while (id != kNone32) {
      if (id >= tables.pages.size())
        chain.end = ChainEnd::out_of_range;
      else if (owner_[id] == bucket)
        chain.end = ChainEnd::cycle;
      else if (owner_[id] != kNone32)
        chain.end = ChainEnd::shared;
      if (chain.end != ChainEnd::whole) {
        chain.bad_link = id;
        break;
      }
      owner_[id] = bucket;
      ids_.push_back(id);
      ++chain.length;
      id = get(tables.pages[id].chain_next);
    }
  }
}

}  // namespace hicache::inspect
