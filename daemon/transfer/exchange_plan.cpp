#include "daemon/transfer/exchange_plan.hpp"

#include <algorithm>
#include <cassert>

#include "daemon/transfer/page_spread.hpp"

namespace hicache::daemon {
namespace {

// The ranks of each GPU, GPUs in the order in which they first appear.
std::vector<std::vector<std::uint32_t>> ranks_by_device(std::span<const ExchangeLoad> loads) {
  std::vector<std::vector<std::uint32_t>> groups;
  for (std::uint32_t rank = 0; rank < loads.size(); ++rank) {
    const auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& ranks) {
      return loads[ranks.front()].device == loads[rank].device;
    });
    if (group == groups.end()) {
      groups.push_back({rank});
    } else {
      group->push_back(rank);
    }
  }
  return groups;
}

// Position of a page in the request, beside what is copied.
struct Placed {
  PagePair pair;
  std::uint32_t index = 0;
  bool passed = false;
};

}  // namespace

bool same_pages(std::span<const ExchangeLoad> loads) {
  return std::all_of(loads.begin(), loads.end(), [&](const ExchangeLoad& load) {
    return std::equal(load.pages.begin(), load.pages.end(), loads.front().pages.begin(),
                      loads.front().pages.end(),
                      [](const PagePair& a, const PagePair& b) { return a.host == b.host; });
  });
}

std::vector<ExchangePart> plan_exchange(std::uint64_t first, std::span<const ExchangeLoad> loads) {
  assert(!loads.empty() && same_pages(loads));
  const auto devices = ranks_by_device(loads);
  const auto count = static_cast<std::uint32_t>(loads.front().pages.size());
  const PageSpread over_devices(first, count, static_cast<std::uint32_t>(devices.size()));

  std::vector<ExchangePart> parts(loads.size());
  for (std::uint32_t device = 0; device < devices.size(); ++device) {
    const auto& ranks = devices[device];
    std::vector<std::uint32_t> mine;  // pages over this GPU's link
    for (std::uint32_t i = 0; i < count; ++i) {
      if (over_devices.way_of(i) == device) mine.push_back(i);
    }
    const PageSpread over_ranks(first, mine.size(), static_cast<std::uint32_t>(ranks.size()));
    for (std::uint32_t turn = 0; turn < ranks.size(); ++turn) {
      const std::uint32_t rank = ranks[turn];
      std::vector<Placed> placed;
      placed.reserve(mine.size());
      for (std::uint32_t at = 0; at < mine.size(); ++at) {
        placed.push_back({loads[rank].pages[mine[at]], mine[at], over_ranks.way_of(at) == turn});
      }
      // The order of sort_pages, with the positions kept beside the pages.
      std::sort(placed.begin(), placed.end(), [](const Placed& a, const Placed& b) {
        if (a.pair.host.value != b.pair.host.value) return a.pair.host.value < b.pair.host.value;
        return a.pair.device.value < b.pair.device.value;
      });
      ExchangePart& part = parts[rank];
      for (std::uint32_t i = 0; i < placed.size(); ++i) {
        part.pages.push_back(placed[i].pair);
        if (placed[i].passed) part.passed.push_back(i);
      }
      if (part.passed.empty()) continue;
      for (std::uint32_t other = 0; other < loads.size(); ++other) {
        if (loads[other].device == loads[rank].device) continue;
        PassTarget& target = part.targets.emplace_back();
        target.rank = other;
        for (const std::uint32_t i : part.passed)
          target.pages.push_back(loads[other].pages[placed[i].index].device);
      }
    }
  }
  return parts;
}

}  // namespace hicache::daemon
