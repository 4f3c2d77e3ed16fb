#include "daemon/transfer/schedule.hpp"

#include <algorithm>
#include <cassert>
#include <limits>

namespace hicache::daemon {
namespace {

constexpr double kCopyNs = 2700;
constexpr double kRowNs = 20;
constexpr double kBytesPerNs = 55.3;
// What an early first layer may cost.
constexpr double kEarlyLayerPrice = 1.16;

}  // namespace

std::uint64_t count_page_runs(std::span<const PagePair> pages) {
  std::uint64_t runs = 0;
  std::uint64_t distance = 0;  // of the run's pages in the pool; 0 = not known yet
  for (std::size_t i = 0; i < pages.size(); ++i) {
    if (i > 0 && pages[i].device.value == pages[i - 1].device.value + 1) {
      const std::uint64_t step = pages[i].host.value - pages[i - 1].host.value;
      if (distance == 0 || step == distance) {
        distance = step;
        continue;
      }
    }
    ++runs;
    distance = 0;
  }
  return runs;
}

Schedules::Schedules(const NamespaceSpec& spec, const DeviceGeometry& geometry, TransferMethod method)
    : page_bytes_(spec.shard_bytes()) {
  const std::uint32_t layers = spec.layers;
  if (method != TransferMethod::page_major) add(spec, geometry, {PlanOrder::layer_major, 1, 1});
  if (method == TransferMethod::layer_major) return;
  for (const std::uint32_t parts : {16u, 10u}) {
    const std::uint32_t group = (layers + parts - 1) / parts;
    if (group > 1 && group < layers) add(spec, geometry, {PlanOrder::page_major, group, group});
  }
  const std::uint32_t head = (layers + 11) / 12;
  if (head < layers) add(spec, geometry, {PlanOrder::page_major, head, layers - head});
  add(spec, geometry, {PlanOrder::page_major, layers, layers});
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

double Schedules::cost_ns(const Candidate& c, std::uint64_t pages, std::uint64_t runs) const {
  const double copies = static_cast<double>(c.copies_per_page * pages + c.copies_per_run * runs);
  return copies * kCopyNs + static_cast<double>(c.rows_per_page * pages) * kRowNs +
         static_cast<double>(page_bytes_ * pages) / kBytesPerNs;
}

double Schedules::estimate_ns(const Schedule& schedule, std::uint64_t pages, std::uint64_t runs) const {
  const auto found = std::find_if(candidates_.begin(), candidates_.end(),
                                  [&](const Candidate& c) { return c.schedule == schedule; });
  assert(found != candidates_.end());
  return cost_ns(*found, pages, runs);
}

Schedule Schedules::choose(std::uint64_t pages, std::uint64_t runs, bool announces_layers) const {
  double best = std::numeric_limits<double>::max();
  for (const Candidate& c : candidates_) best = std::min(best, cost_ns(c, pages, runs));
  const double limit = announces_layers ? best * kEarlyLayerPrice : best;
  for (const Candidate& c : candidates_) {
    if (cost_ns(c, pages, runs) <= limit) return c.schedule;
  }
  return candidates_.back().schedule;
}

}  // namespace hicache::daemon
