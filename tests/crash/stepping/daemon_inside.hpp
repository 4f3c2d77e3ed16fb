// Everything of a daemon that decides and commits (region, coordinator, copies) on the caller's thread, over
// real named shared memory as small as it can be made.
#pragma once

#include <stdexcept>
#include <string>

#include "daemon/coordinator/coordinator_impl.hpp"
#include "daemon/region_owner.hpp"
#include "tests/crash/stepping/inline_transfers.hpp"

namespace hicache::test {

constexpr std::uint32_t kSmallPages = 12;

// Configuration of a region whose tables fit into a few dozen lines of 4 KiB, as overrides for TestDaemon.
constexpr const char* kSmallDaemon = R"({
  "pool": {"bytes": "128KiB", "segment_bytes": "64KiB", "max_pages": 12},
  "region": {"keep_on_exit": true, "flight_records": 16},
  "eviction": {"high_watermark": 0},
  "waiting": {"spin_us": 0, "yield_us": 0, "park_ms": 5},
  "client_waiting": {"spin_us": 0, "yield_us": 0, "park_ms": 5},
  "limits": {"clients": 4, "namespaces": 4, "leases": 8, "leases_per_group": 6, "submission_entries": 4,
             "completion_entries": 16, "arena_bytes": 4096}
})";

constexpr std::uint32_t kWriteBlock = 2;  // so that writes of a few pages are several copies

class DaemonInside {
 public:
  DaemonInside(const daemon::Config& config, daemon::RegionOwner::Start start)
      : region_(take(daemon::RegionOwner::create(config, config.socket.path, start))),
        coordinator_(daemon::CoordinatorOptions{
            config, region_.tables(), region_.taken_over(), region_.pool_bytes(), nullptr, {}, kWriteBlock}),
        transfers_(options(config), daemon::make_host_backend(region_.pool(), region_.pool_bytes()),
                   [this](const daemon::TransferDone& done) { coordinator_.inbox.post(done); }) {
    coordinator_.transfers = &transfers_;
    region_.publish();
  }

  // Turns until there is nothing left to do.
  void settle() {
    while (coordinator_.turn()) {
    }
  }

  [[nodiscard]] daemon::RegionOwner& region() { return region_; }
  [[nodiscard]] daemon::Coordinator::Impl& coordinator() { return coordinator_; }
  [[nodiscard]] InlineTransfers& transfers() { return transfers_; }
  [[nodiscard]] const Tables& tables() const { return region_.tables(); }

 private:
  static daemon::RegionOwner take(Result<daemon::RegionOwner> region) {
    if (!region) throw std::runtime_error(region.error().message);
    return std::move(*region);
  }
  daemon::TransferOptions options(const daemon::Config& config) const {
    daemon::TransferOptions o;
    o.border_bytes = config.pool.segment_bytes;
    o.pool_bytes = region_.pool_bytes();
    return o;
  }

  daemon::RegionOwner region_;
  daemon::Coordinator::Impl coordinator_;
  InlineTransfers transfers_;
};

}  // namespace hicache::test
