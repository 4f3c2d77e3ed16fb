// Whether a daemon may take over the shared memory that an earlier one left under its name. Looks only;
// changes nothing.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "daemon/config.hpp"
#include "shm/fd.hpp"
#include "shm/region.hpp"
#include "shm/status.hpp"

namespace hicache::daemon {

// An earlier daemon's objects that fit this configuration, open for writing. Its process is gone.
struct TakeoverRegion {
  UniqueFd control;
  UniqueFd pool;
};

struct Leftover {
  std::optional<TakeoverRegion> region;  // nothing: there is none, or it does not fit
  std::vector<std::string> misfits;      // why not, as sentences; empty when nothing was there
};

// Looks at the objects under config.name. `plan` and `pool_bytes` are what this configuration makes. busy
// when the process that owned the region has not ended within `patience_ms`: its copies may still land. The
// caller holds the name's lock.
Result<Leftover> examine_leftover(const Config& config, const RegionPlan& plan, std::uint64_t pool_bytes,
                                  int patience_ms);

}  // namespace hicache::daemon
