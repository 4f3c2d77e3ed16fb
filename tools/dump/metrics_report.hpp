// Counters and gauges of a region in Prometheus' text exposition format, version 0.0.4, for a collector that
// reads files or runs a command. Works for a dead daemon too: `hicache_up` says which it is.
#pragma once

#include "tools/dump/output.hpp"
#include "tools/dump/snapshot.hpp"

namespace hicache::inspect {

// Of an unusable region only `hicache_up 0` is written.
void write_metrics(Output& out, const Snapshot& snapshot);

}  // namespace hicache::inspect
