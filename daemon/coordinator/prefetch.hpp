// A prefetch of a lease: one decision for its group about which pages come from storage, and who waits for
// them.
#pragma once

#include <cstdint>
#include <vector>

#include "daemon/coordinator/waiting_rank.hpp"
#include "daemon/storage/leading_hits.hpp"
#include "shm/protocol.hpp"
#include "shm/status.hpp"
#include "shm/types.hpp"

namespace hicache::daemon {

// It asks storage which pages it has (query), then waits until each of them is ready or lost. Positions count
// from the request's first page.
struct Prefetch {
  std::uint64_t number = 0;  // finds it again from a deadline or an answer of storage
  LeaseId lease;
  std::uint32_t first = 0;  // range that was asked for
  std::uint32_t count = 0;
  PrefetchPolicy policy = PrefetchPolicy::best_effort;
  std::vector<WaitingRank> participants;

  std::uint32_t begin = 0;  // position behind the pages that were ready at once
  std::uint32_t end = 0;    // position behind the last page that is wanted, once the query is over
  LeadingHits query;
  std::uint64_t query_request = 0;      // 0 = no query is open
  std::vector<std::uint64_t> requests;  // reads of storage on its behalf
  std::uint64_t begun_ns = 0;
  std::uint64_t limit_ns = 0;     // policy timeout: when it counts as done
  std::uint64_t deadline_ns = 0;  // of the operation

  std::uint32_t hits = 0;        // pages that storage had
  std::uint32_t present = 0;     // pages that were ready already, or came from elsewhere
  std::uint32_t fetched = 0;     // pages that came from storage
  std::uint32_t unresolved = 0;  // pages that may still come
  std::uint32_t held = 0;        // pages that were allocated for it
  bool ended = false;
  Status end_status = Status::ok;

  // The group's questions about it, from 1: no rank may see another answer to the same one.
  std::uint32_t last_check = 0;
  std::uint32_t ended_at_check = 0;  // from this one on the answer is "done"; 0 = not yet

  // Every page that may come has come. Not before the query is over: nothing asked for is not everything had.
  [[nodiscard]] bool complete() const { return query_request == 0 && unresolved == 0; }
};

// A prefetch that waits for a page that is being filled.
struct PrefetchWait {
  Prefetch* prefetch = nullptr;
  std::uint32_t position = 0;
  bool pinned = false;  // by the prefetch, and not by a write of the same lease
};

}  // namespace hicache::daemon
