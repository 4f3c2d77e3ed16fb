// How a TP group loads pages that are the same on all ranks: each page comes over one GPU's link, to every
// rank on that GPU, and one of them passes it on to the ranks on other GPUs. Pure code.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "daemon/transfer/planner.hpp"

namespace hicache::daemon {

// A rank's load: the same host pages as the others', at device pages of its own.
struct ExchangeLoad {
  std::uint32_t device = 0;  // which GPU the rank is on
  std::span<const PagePair> pages;
};

// A rank on another GPU, and the device pages there of the pages that are passed on to it.
struct PassTarget {
  std::uint32_t rank = 0;
  std::vector<DevicePage> pages;  // one for each of ExchangePart::passed
};

// What the copy engines of one rank's GPU do for the group on behalf of this rank.
struct ExchangePart {
  std::vector<PagePair> pages;        // from the pool to this rank, in plan order (sort_pages)
  std::vector<std::uint32_t> passed;  // indices of `pages` that this rank passes on, ascending
  std::vector<PassTarget> targets;    // empty when nothing is passed on
};

// A part for every rank. All parts together bring every page to every rank exactly once. `first` is the
// loads' position in the request. Precondition: at least one load, and same_pages(loads).
std::vector<ExchangePart> plan_exchange(std::uint64_t first, std::span<const ExchangeLoad> loads);

// Whether all ranks ask for the same host pages in the same order.
bool same_pages(std::span<const ExchangeLoad> loads);

}  // namespace hicache::daemon
