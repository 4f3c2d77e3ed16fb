// Backups: what is to be kept in storage, in the order in which it became ready.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "daemon/storage/fair_queue.hpp"
#include "shm/types.hpp"

namespace hicache::daemon {

// A page that is to be backed up, unless it has become another one meanwhile.
struct BackupPage {
  PageId page;
  Generation generation;
  bool storing = false;  // marked so already, so that it can't be evicted while it waits
};

// Pages of one group that became ready together, in prefix order. They go in batches, one after the other;
// when a page of a batch is not kept, the rest is not tried, because nothing behind it could be found. An
// operation ends exactly once.
struct BackupOperation {
  std::uint64_t number = 0;
  std::uint32_t owner = 0;  // group
  NamespaceId ns;
  std::vector<BackupPage> pages;
  std::size_t next = 0;  // first page that was not sent yet
  std::uint32_t kept = 0;
  bool failed = false;
};

struct Backups {
  struct Candidate {
    BackupPage page;
    std::uint32_t owner = 0;
  };
  std::vector<Candidate> candidates;  // of this turn
  std::vector<bool> queued;           // by page: a candidate or waiting, so that it is not queued twice
  FairQueue<BackupOperation> waiting;
  std::uint32_t waiting_pages = 0;
  std::unordered_map<std::uint64_t, BackupOperation> running;  // by number

  [[nodiscard]] bool idle() const { return candidates.empty() && waiting.empty() && running.empty(); }
};

}  // namespace hicache::daemon
