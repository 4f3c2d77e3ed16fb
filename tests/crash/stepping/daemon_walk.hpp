// A walk through one commit of a stepped daemon: in each state that it leaves in the region, what readers
// find and what a takeover makes of it.
#pragma once

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "tests/crash/stepping/reader_view.hpp"
#include "tests/crash/stepping/recovery.hpp"
#include "tests/crash/stepping/single_step.hpp"
#include "tests/crash/stepping/watched_region.hpp"

namespace hicache::test {

struct States {
  std::vector<std::set<Key>> kept;  // by each distinct state what a takeover of it keeps
  std::vector<std::string> faults;  // the walk ends when there are `enough`
  std::size_t enough = 20;
};

// `view` is null where nobody may read: during a takeover.
inline SteppedProcess::Walk walk(SteppedProcess& process, WatchedRegion& region, Recovery& recovery,
                                 ReaderView* view, States& states) {
  region.changed();
  return process.step_to_mark([&] {
    if (!region.changed()) return true;
    const auto take = [&](std::vector<std::string> faults) {
      for (auto& fault : faults) states.faults.push_back(std::move(fault));
    };
    if (view != nullptr) take(view->look(region.tables(), region.pool()));
    auto outcome = recovery.run(region.bytes(), region.pool());
    states.kept.push_back(std::move(outcome.kept));
    take(std::move(outcome.faults));
    return states.faults.size() < states.enough;
  });
}

// Of a commit that began with the pages `before` and ended with `after`: no takeover may lose one that was
// there all the time, or find one that never was.
inline std::vector<std::string> wrongly_kept(const States& states, const std::set<Key>& before,
                                             const std::set<Key>& after) {
  std::set<Key> stays;
  std::set_intersection(before.begin(), before.end(), after.begin(), after.end(),
                        std::inserter(stays, stays.end()));
  std::set<Key> ever = before;
  ever.insert(after.begin(), after.end());
  std::vector<std::string> faults;
  for (const auto& kept : states.kept) {
    if (!std::includes(kept.begin(), kept.end(), stays.begin(), stays.end()))
      faults.emplace_back("a takeover loses a page that was ready all the time");
    if (!std::includes(ever.begin(), ever.end(), kept.begin(), kept.end()))
      faults.emplace_back("a takeover keeps a page that was never ready");
  }
  return faults;
}

}  // namespace hicache::test
