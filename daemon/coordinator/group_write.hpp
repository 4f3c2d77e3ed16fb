// A write operation of a TP group: one decision about a range of a request's pages, and the ranks that take
// part.
#pragma once

#include <cstdint>
#include <vector>

#include "daemon/transfer/transfers.hpp"
#include "shm/page_word.hpp"
#include "shm/status.hpp"
#include "shm/types.hpp"

namespace hicache::daemon {

// One page of the range. status: ok once published, exists / busy / dropped as decided, again while it is
// being filled.
struct WritePage {
  PageId page;          // only pages that this operation allocated
  bool states = false;  // it comes with the states of the trailing pools
  Status status = Status::again;
};

// A rank that posted the operation.
struct WriteParticipant {
  bool posted = false;
  bool answered = false;    // its terminal completion has been sent
  bool owes_pages = false;  // answered with kPagesBusy: kPagesReturned is due when the last copy ends
  ClientSlot client;
  Generation client_generation;
  std::uint64_t user_data = 0;
  std::uint64_t operation_sequence = 0;
  std::uint64_t results_at = 0;     // arena offset of its result words
  std::vector<TransferId> copying;  // its transfers that have not ended
  std::uint64_t bytes = 0;
  std::vector<std::uint32_t> positions;  // indices into `pages` that its transfers copy, one behind the other
};

// How far the pages of a write are decided.
struct WriteDecision {
  std::uint64_t room = 0;     // bytes of the pool that the group may still pin
  PageId previous;            // page of the position before, or none
  bool broken_chain = false;  // there is none there: a page without its predecessor could never be found
};

struct GroupWrite {
  LeaseId lease;
  std::uint32_t first = 0;
  std::vector<WritePage> pages;
  std::vector<WriteParticipant> ranks;  // by tp rank
  std::uint32_t unresolved = 0;         // pages whose status is again
  std::uint32_t copying = 0;            // transfers in flight
  bool ended = false;                   // terminal: every posted rank has been answered
  Status end_status = Status::ok;
  std::uint64_t number = 0;      // finds it again from a deadline or a transfer
  std::vector<PageId> aborting;  // given-up pages whose slots a copy may still touch
  std::uint32_t written = 0;
  std::uint32_t present = 0;
  std::uint32_t filling = 0;
  std::uint32_t dropped = 0;
};

}  // namespace hicache::daemon
