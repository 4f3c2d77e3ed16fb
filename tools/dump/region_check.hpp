// --check: from findings of single snapshots to a judgement over a region that may change while it is read.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tools/dump/checker.hpp"
#include "tools/dump/region_source.hpp"
#include "tools/dump/snapshot.hpp"

namespace hicache::inspect {

// How often a changing region is read again. A finding must be in every snapshot up to its proof.
struct CheckPolicy {
  std::uint32_t structure_repeats = 3;  // further snapshots that prove a wrong structure
  std::uint32_t count_repeats = 11;     // that prove a wrong count; one quiet snapshot is as good
  std::uint32_t quiet_attempts = 20;    // snapshots tried to get one in which the coordinator stood still
  std::uint64_t budget_ns = 10'000'000'000;        // no further snapshot after this
  std::function<void(std::uint32_t round)> pause;  // between snapshots; empty = sleep a few milliseconds
};

struct CheckReport {
  std::vector<Finding> findings;
  std::uint64_t left_out = 0;   // further findings that were counted but not kept
  std::uint32_t snapshots = 0;  // read for this check
  bool exact = false;           // nothing changes the region: one snapshot is the truth
  bool gauges_compared = false;
  std::vector<std::string> notes;  // what could not be checked, and why
};

// `first` is a snapshot of `source`.
CheckReport check_region(RegionSource& source, const Snapshot& first, const CheckPolicy& policy = {});

}  // namespace hicache::inspect
