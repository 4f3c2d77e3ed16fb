// In which order a copy engine is given a transfer's pieces: page by page or layer by layer, and in what
// groups of layers. Pure code.
//
// A copy costs a fixed time and a time per row beside its bytes, so few and large copies are fast: a page's
// layers in one pitched copy where they have a constant stride, a layer of many consecutive pages in one copy
// where pages follow each other. A load whose layers are announced should also have its first layers ready
// early. The figures are those measured for one H200 on PCIe 5 x16 (docs/gpu.md); what counts is their ratio.
//
// A transfer that goes through the rank's staging memory needs few copies whatever the rows are, but takes a
// round trip to the rank and a little of the model's speed: it is chosen where it is clearly faster.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "daemon/transfer/planner.hpp"

namespace hicache::daemon {

// What the configuration asks for.
enum class TransferMethod : std::uint8_t {
  automatic,    // the fastest of those below, except the last two
  page_major,   // pitched copies, a page at a time
  layer_major,  // pitched copies, a layer at a time
  staged,       // through the rank's staging memory
  contiguous,   // one copy for each contiguous piece: for comparison
  batched,      // the same, many pieces in a driver call: for comparison
};

// Layers are copied in groups, the first of `first_group` layers, the others of `group` (the last may be
// smaller). A layer_major group is one layer.
struct Schedule {
  PlanOrder order = PlanOrder::page_major;
  std::uint32_t first_group = 0;
  std::uint32_t group = 0;
  bool staged = false;  // through staging memory; page_major then
  friend bool operator==(const Schedule&, const Schedule&) = default;
};

// How a transfer's pages follow each other. A run is maximal, and its pages are equally far apart.
struct PageRuns {
  std::uint64_t pages = 0;
  std::uint64_t both =
      0;  // runs of pages that are neighbours in the device's tensors and evenly apart in the pool
  std::uint64_t pool = 0;  // runs that are evenly apart in the pool, wherever they lie on the device
};
// Precondition: pages are in plan order (sort_pages).
PageRuns count_page_runs(std::span<const PagePair> pages);

// The choices for one rank's geometry, made once and used for every transfer. Immutable, so thread-safe.
class Schedules {
 public:
  // `staging_slot_bytes` is 0 where the rank has no staging memory.
  Schedules(const NamespaceSpec& spec, const DeviceGeometry& geometry, TransferMethod method,
            std::uint64_t staging_slot_bytes = 0);

  // With `announces_layers` the earliest first layer whose total time is near the best one. Without
  // `may_stage` one that copies straight to the pages.
  [[nodiscard]] Schedule choose(const PageRuns& pages, bool announces_layers, bool may_stage = true) const;
  // How long a schedule's copies should take while a model runs, in nanoseconds.
  [[nodiscard]] double estimate_ns(const Schedule& schedule, const PageRuns& pages) const;

 private:
  struct Candidate {
    Schedule schedule;
    std::uint64_t copies_per_page = 0;
    std::uint64_t copies_per_run = 0;
    std::uint64_t rows_per_page = 0;
  };
  void add(const NamespaceSpec& spec, const DeviceGeometry& geometry, const Schedule& schedule);
  void add_pitched(const NamespaceSpec& spec, const DeviceGeometry& geometry, TransferMethod method);
  void add_staged(const NamespaceSpec& spec);
  [[nodiscard]] bool allowed(const Candidate& candidate, bool may_stage) const;
  [[nodiscard]] double cost_ns(const Candidate& candidate, const PageRuns& pages) const;

  std::uint64_t page_bytes_;
  std::uint64_t staging_slot_bytes_;
  std::uint32_t layers_;
  std::uint32_t kinds_;
  bool staged_ = false;                // some candidate is
  bool only_staged_ = false;           // the others are for transfers that can't be
  std::vector<Candidate> candidates_;  // from the earliest first layer to the latest
};

}  // namespace hicache::daemon
