// In which order a copy engine is given a transfer's pieces: page by page or layer by layer, and in what
// groups of layers. Pure code.
//
// A copy costs a fixed time and a time per row beside its bytes, so few and large copies are fast: a page's
// layers in one pitched copy where they have a constant stride, a layer of many consecutive pages in one copy
// where pages follow each other. A load whose layers are announced should also have its first layers ready
// early. The figures are those measured for one H200 on PCIe 5 x16 (docs/gpu.md); what counts is their ratio.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "daemon/transfer/planner.hpp"

namespace hicache::daemon {

// What the configuration asks for.
enum class TransferMethod : std::uint8_t { automatic, page_major, layer_major };

// Layers are copied in groups, the first of `first_group` layers, the others of `group` (the last may be
// smaller). A layer_major group is one layer.
struct Schedule {
  PlanOrder order = PlanOrder::page_major;
  std::uint32_t first_group = 0;
  std::uint32_t group = 0;
  friend bool operator==(const Schedule&, const Schedule&) = default;
};

// Maximal runs of pages that are neighbours in the device's tensors and equally far apart in the pool.
// Precondition: pages are in plan order (sort_pages).
std::uint64_t count_page_runs(std::span<const PagePair> pages);

// The choices for one rank's geometry, made once and used for every transfer. Immutable, so thread-safe.
class Schedules {
 public:
  Schedules(const NamespaceSpec& spec, const DeviceGeometry& geometry, TransferMethod method);

  // The schedule for `pages` pages in `runs` runs. With `announces_layers` the earliest first layer whose
  // total time is near the best one.
  [[nodiscard]] Schedule choose(std::uint64_t pages, std::uint64_t runs, bool announces_layers) const;
  // How long a schedule's copies should take, in nanoseconds.
  [[nodiscard]] double estimate_ns(const Schedule& schedule, std::uint64_t pages, std::uint64_t runs) const;

 private:
  struct Candidate {
    Schedule schedule;
    std::uint64_t copies_per_page = 0;
    std::uint64_t copies_per_run = 0;
    std::uint64_t rows_per_page = 0;
  };
  void add(const NamespaceSpec& spec, const DeviceGeometry& geometry, const Schedule& schedule);
  [[nodiscard]] double cost_ns(const Candidate& candidate, std::uint64_t pages, std::uint64_t runs) const;

  std::uint64_t page_bytes_;
  std::vector<Candidate> candidates_;  // from the earliest first layer to the latest
};

}  // namespace hicache::daemon
