// What a new daemon may keep of the pages that it finds in a region: the part of a takeover that only looks.
// Everything in the tables may be torn by a death at any instruction, or damaged: nothing is trusted that is
// not checked here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shm/region.hpp"

namespace hicache::daemon {

// A half-written page that processes which map the pool may still write to.
struct HeldPage {
  PageId page;
  std::uint64_t tag = 0;  // ClientEntry::pool_tag of those processes
};

struct PageSurvey {
  std::vector<HeldPage> held;       // neither kept nor free until those processes have ended
  std::vector<ClientSlot> mappers;  // clients that map the pool and whose processes live
  std::vector<PageId> keep;         // parents before their children
  std::vector<bool> namespaces;     // by NamespaceId: its entry is sound
  std::uint32_t ready = 0;          // pages that were ready
  std::uint32_t half_written = 0;   // reserved, filling, evicting or aborting, and not held: dropped
  std::uint32_t inconsistent = 0;   // ready, but with an entry that can't be true: dropped
  std::uint32_t orphans = 0;  // ready and sound, but below a page that is dropped, or of a retired namespace
  std::uint32_t shards_verified = 0;  // with verify: full
  std::uint32_t wrong_checksums = 0;
  std::vector<std::string> findings;  // the first few inconsistent entries, as sentences
};

// A page is kept when it was ready, its seal is right, its namespace is in use and agrees with the page's
// place, no other page claims its key or its bytes, and its parent is kept. A page that is being filled by a
// process that maps the pool is held while such a process lives. Never fails, whatever the tables hold.
PageSurvey survey_pages(const ConstTables& tables, std::uint64_t pool_bytes, std::uint64_t segment_bytes);

}  // namespace hicache::daemon
