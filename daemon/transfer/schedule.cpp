#include "daemon/transfer/schedule.hpp"

#include <algorithm>
#include <cassert>
#include <limits>

#include "daemon/transfer/staged_plan.hpp"

namespace hicache::daemon {
namespace {

constexpr double kBytesPerNs = 55.3;
// Pages move while a model runs. A pitched copy costs 2.7 us beside its bytes on an idle GPU and beside
// matrix products, and about 10 us beside a kernel that streams memory.
constexpr double kCopyNs = 6000;
constexpr double kRowNs = 5;
// Rows between the pool and staging memory are apart on the host's side, which costs more: the farther, the
// less two of them share in the tables that translate the host's addresses. Measured at pages of 40 KiB: 20
// ns a row alone and 50 beside a kernel that streams memory, of 128 KiB 75 and 150, of 0.6 MiB 200 and 500,
// of 2.5 MiB 200 and 1000.
constexpr double kStagedRowNs = 400;
constexpr double kFarRowBytes = 400.0 * kKiB;
// How much longer copies take whose rows are a layer's piece of one page after the other, while a model runs
// and however long the runs of pages are.
constexpr double kPageRowsFactor = 1.25;
// A round trip to a rank whose thread sleeps, and the kernels of the first and last slot.
constexpr double kStagedStartNs = 80'000;
// What staging must gain to be worth the multiprocessors that its kernels take.
constexpr double kStagedGain = 1.03;
// What an early first layer may cost: through staging memory, without it, and past it.
constexpr double kStagedEarlyLayerPrice = 1.25;
constexpr double kEarlyLayerPrice = 1.35;
constexpr double kUnstagedEarlyLayerPrice = 1.05;

}  // namespace

PageRuns count_page_runs(std::span<const PagePair> pages) {
  PageRuns runs;
  runs.pages = pages.size();
  std::uint64_t distance = 0;  // of the run's pages in the pool; 0 = not known yet
  std::uint64_t pool_distance = 0;
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const std::uint64_t step = i == 0 ? 0 : pages[i].host.value - pages[i - 1].host.value;
    if (i > 0 && (pool_distance == 0 || step == pool_distance)) {
      pool_distance = step;
    } else {
      ++runs.pool;
      pool_distance = 0;
    }
    if (i > 0 && pages[i].device.value == pages[i - 1].device.value + 1 &&
        (distance == 0 || step == distance)) {
      distance = step;
    } else {
      ++runs.both;
      distance = 0;
    }
  }
  return runs;
}

Schedules::Schedules(const NamespaceSpec& spec, const DeviceGeometry& geometry, TransferMethod method,
                     std::uint64_t staging_slot_bytes)
    : page_bytes_(spec.shard_bytes()),
      staging_slot_bytes_(staging_slot_bytes),
      layers_(spec.layers),
      kinds_(spec.kinds()) {
  const bool can = staging_slot_bytes > 0 && can_stage(spec, staging_slot_bytes);
  if (can && (method == TransferMethod::automatic || method == TransferMethod::staged)) add_staged(spec);
  only_staged_ = can && method == TransferMethod::staged;
  add_pitched(spec, geometry, method);
  std::stable_sort(candidates_.begin(), candidates_.end(), [](const Candidate& a, const Candidate& b) {
    return a.schedule.first_group < b.schedule.first_group;
  });
}

void Schedules::add_pitched(const NamespaceSpec& spec, const DeviceGeometry& geometry,
                            TransferMethod method) {
  const std::uint32_t layers = spec.layers;
  const bool pieces = method == TransferMethod::contiguous || method == TransferMethod::batched;
  if (method != TransferMethod::page_major && !pieces) add(spec, geometry, {PlanOrder::layer_major, 1, 1});
  if (method != TransferMethod::layer_major) {
    for (const std::uint32_t parts : {16u, 8u, 4u}) {
      const std::uint32_t group = (layers + parts - 1) / parts;
      if (group > 1 && group < layers) add(spec, geometry, {PlanOrder::page_major, group, group});
    }
    const std::uint32_t head = (layers + 11) / 12;
    if (head < layers) add(spec, geometry, {PlanOrder::page_major, head, layers - head});
    add(spec, geometry, {PlanOrder::page_major, layers, layers});
  }
}

void Schedules::add_staged(const NamespaceSpec& spec) {
  staged_ = true;
  const std::uint32_t layers = spec.layers;
  const auto part = [&](std::uint32_t parts) { return (layers + parts - 1) / parts; };
  const auto add = [&](std::uint32_t first_group, std::uint32_t group) {
    if (first_group < layers) candidates_.push_back({{PlanOrder::page_major, first_group, group, true}});
  };
  // The first layers are few: their rows are the shortest, and what they wait for counts most. Behind them
  // smaller groups, which let a model go on earlier, come before those that have fewer rows.
  const std::uint32_t head = part(40);
  for (const std::uint32_t parts : {16u, 4u}) add(head, part(parts));
  add(head, layers - head);
  for (const std::uint32_t parts : {8u, 4u}) add(part(parts), part(parts));
  candidates_.push_back({{PlanOrder::page_major, layers, layers, true}});
}

void Schedules::add(const NamespaceSpec& spec, const DeviceGeometry& geometry, const Schedule& schedule) {
  Candidate c;
  c.schedule = schedule;
  if (schedule.order == PlanOrder::layer_major) {
    c.copies_per_run = geometry.tensors.size();
    c.rows_per_page = geometry.tensors.size();
  } else {
    for (std::uint32_t layer = 0; layer < spec.layers;) {
      const std::uint32_t end =
          std::min(layer + (layer == 0 ? schedule.first_group : schedule.group), spec.layers);
      const GroupShape shape = group_shape(spec, geometry, layer, end);
      layer = end;
      c.copies_per_page += shape.pitched;
      c.copies_per_run += shape.contiguous;
      c.rows_per_page += shape.rows;
    }
  }
  candidates_.push_back(c);
}

double Schedules::cost_ns(const Candidate& c, const PageRuns& pages) const {
  const auto count = static_cast<double>(pages.pages);
  const double bytes_ns = static_cast<double>(page_bytes_) * count / kBytesPerNs;
  if (c.schedule.staged) {
    // K and V of some layers are two rows of a page in the pool. Whole pages follow each other without rows.
    const std::uint32_t groups =
        c.schedule.first_group == layers_
            ? 1
            : 1 + (layers_ - c.schedule.first_group + c.schedule.group - 1) / c.schedule.group;
    const double rows = groups == 1 ? 0 : groups * kinds_;
    // Runs of the pool are cut where slots end.
    const double slots = static_cast<double>(page_bytes_) * count / static_cast<double>(staging_slot_bytes_);
    const double copies = std::max(rows, 1.0) * std::max(static_cast<double>(pages.pool), slots / groups);
    const double row_ns = kStagedRowNs * std::min(1.0, static_cast<double>(page_bytes_) / kFarRowBytes);
    return kStagedGain * (kStagedStartNs + copies * kCopyNs + count * rows * row_ns + bytes_ns);
  }
  const double copies = static_cast<double>(c.copies_per_page) * count +
                        static_cast<double>(c.copies_per_run) * static_cast<double>(pages.both);
  const bool page_rows = c.copies_per_page == 0 && c.rows_per_page > 1;
  return copies * kCopyNs + static_cast<double>(c.rows_per_page) * count * kRowNs +
         (page_rows ? kPageRowsFactor : 1) * bytes_ns;
}

double Schedules::estimate_ns(const Schedule& schedule, const PageRuns& pages) const {
  const auto found = std::find_if(candidates_.begin(), candidates_.end(),
                                  [&](const Candidate& c) { return c.schedule == schedule; });
  assert(found != candidates_.end());
  return cost_ns(*found, pages);
}

bool Schedules::allowed(const Candidate& c, bool may_stage) const {
  return c.schedule.staged ? may_stage : !(may_stage && only_staged_);
}

Schedule Schedules::choose(const PageRuns& pages, bool announces_layers, bool may_stage) const {
  double best = std::numeric_limits<double>::max();
  for (const Candidate& c : candidates_) {
    if (allowed(c, may_stage)) best = std::min(best, cost_ns(c, pages));
  }
  const double past_staging = staged_ && may_stage ? kUnstagedEarlyLayerPrice : kEarlyLayerPrice;
  for (const Candidate& c : candidates_) {
    const double price = c.schedule.staged ? kStagedEarlyLayerPrice : past_staging;
    if (allowed(c, may_stage) && cost_ns(c, pages) <= (announces_layers ? price : 1) * best)
      return c.schedule;
  }
  assert(false && "the cheapest one is allowed");
  return candidates_.back().schedule;
}

}  // namespace hicache::daemon
