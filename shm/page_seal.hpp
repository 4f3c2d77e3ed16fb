// The seal of a ready page: a hash over everything that says which page an entry is and where its bytes lie.
// A daemon that takes a region over keeps a page only when its seal is right, so that a torn or overwritten
// entry is a lost hit and never a wrong page. The bytes themselves are the checksums' business.
#pragma once

#include <cstdint>

#include "shm/page_word.hpp"
#include "shm/region_layout.hpp"

namespace hicache {

// What the seal of this entry must be while it is ready. Never 0: that means "no seal".
inline std::uint64_t page_seal(const PageEntry& page) {
  constexpr auto relaxed = std::memory_order_relaxed;
  std::uint64_t hash = 0x51ed270b7a14ad5full;
  const auto add = [&hash](std::uint64_t value) {
    hash = (hash ^ value) * 0x9fb21c651e98df25ull;
    hash ^= hash >> 28;
  };
  for (const A64& word : page.key) add(word.load(relaxed));
  const PageWord word = PageWord::decode(page.word.load(relaxed));
  add(word.generation.value);
  if ((word.flags & PageWord::kStates) != 0) add(PageWord::kStates);
  add(page.namespace_id.load(relaxed));
  add(page.pool_offset.load(relaxed));
  add(page.parent.load(relaxed));
  add(page.parent_generation.load(relaxed));
  add(page.depth.load(relaxed));
  return hash == 0 ? 1 : hash;
}

}  // namespace hicache
