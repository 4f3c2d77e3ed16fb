#include "tools/dump/region_check.hpp"

#include <algorithm>
#include <ctime>
#include <map>
#include <optional>

#include "shm/clock.hpp"

namespace hicache::inspect {
namespace {

using FindingMap = std::map<FindingId, Finding>;

struct Split {
  FindingMap structure;  // and counts
  FindingMap gauges;
};

Split split(const Findings& findings) {
  Split s;
  for (const Finding& f : findings.list())
    (f.proof == Proof::gauge ? s.gauges : s.structure).emplace(f.id, f);
  return s;
}

void keep_common(FindingMap& candidates, const FindingMap& seen) {
  std::erase_if(candidates, [&](const auto& entry) { return !seen.contains(entry.first); });
}

void sleep_before(std::uint32_t round) {
  const timespec pause{0, static_cast<long>(std::min(round, 10u)) * 1'000'000};
  ::nanosleep(&pause, nullptr);
}

class Rounds {
 public:
  explicit Rounds(const CheckPolicy& policy) : policy_(policy) {}

  void add(const Snapshot& snapshot) {
    const Findings found = check_snapshot(snapshot, snapshot.quiet());
    Split s = split(found);
    if (snapshots_++ == 0) {
      structure_ = std::move(s.structure);
    } else {
      keep_common(structure_, s.structure);
    }
    left_out_ = snapshots_ == 1 ? found.left_out() : std::min(left_out_, found.left_out());
    if (!snapshot.quiet()) return;
    if (quiet_++ == 0) {
      gauges_ = std::move(s.gauges);
    } else {
      keep_common(gauges_, s.gauges);
    }
  }

  [[nodiscard]] bool finished() const {
    const bool gauges_done = quiet_ >= (gauges_.empty() ? 1u : 1u + policy_.structure_repeats);
    if (!gauges_done && snapshots_ < policy_.quiet_attempts) return false;
    const std::uint32_t repeats = snapshots_ - 1;
    return std::all_of(structure_.begin(), structure_.end(), [&](const auto& entry) {
      if (repeats < policy_.structure_repeats) return false;
      return entry.second.proof == Proof::structure || quiet_ > 0 || repeats >= policy_.count_repeats;
    });
  }

  void report(CheckReport& out) const {
    for (const auto& [id, finding] : structure_) out.findings.push_back(finding);
    for (const auto& [id, finding] : gauges_) out.findings.push_back(finding);
    // What was not kept can't be followed from snapshot to snapshot: it only counts beside findings that
    // were.
    out.left_out = out.findings.empty() ? 0 : left_out_;
    out.snapshots = snapshots_;
    out.gauges_compared = quiet_ > 0;
  }

 private:
  const CheckPolicy& policy_;
  FindingMap structure_;
  FindingMap gauges_;
  std::uint64_t left_out_ = 0;
  std::uint32_t snapshots_ = 0;
  std::uint32_t quiet_ = 0;
};

CheckReport check_exactly(const Snapshot& snapshot) {
  CheckReport report;
  const Findings found = check_snapshot(snapshot, true);
  report.findings = found.list();
  report.left_out = found.left_out();
  report.snapshots = 1;
  report.exact = true;
  report.gauges_compared = snapshot.usable();
  if (!snapshot.usable()) report.notes.push_back("the tables were not checked: the header can't be trusted");
  if (snapshot.usable() && snapshot.commit_sequence() % 2 != 0) {
    report.notes.push_back("the commit sequence is odd: the tables were left in the middle of a change");
  }
  return report;
}

}  // namespace

CheckReport check_region(RegionSource& source, const Snapshot& first, const CheckPolicy& policy) {
  if (!first.usable() || !first.may_change()) return check_exactly(first);
  const std::uint64_t deadline = monotonic_ns() + policy.budget_ns;
  Rounds rounds(policy);
  rounds.add(first);
  std::optional<std::string> cut;
  for (std::uint32_t round = 1; !rounds.finished(); ++round) {
    if (monotonic_ns() >= deadline) {
      cut = "stopped after " + std::to_string(policy.budget_ns / 1'000'000'000) +
            " s: findings below may not have been read often enough to be sure";
      break;
    }
    if (policy.pause)
      policy.pause(round);
    else
      sleep_before(round);
    const Snapshot next = Snapshot::take(source);
    if (!next.usable()) return check_exactly(next);
    rounds.add(next);
    // The daemon ended meanwhile: this one is the truth.
    if (!next.may_change()) return check_exactly(next);
  }
  CheckReport report;
  rounds.report(report);
  if (cut && !report.findings.empty()) report.notes.push_back(*cut);
  if (!report.gauges_compared) {
    report.notes.push_back("gauges were not compared: the coordinator was busy in each of " +
                           std::to_string(report.snapshots) + " snapshots");
  }
  return report;
}

}  // namespace hicache::inspect
