#include "hicache/controller/move_indices.hpp"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

namespace hicache {
namespace {

Error bad(std::string text) {
  return Error{Status::invalid_argument, std::move(text), 0};
}

constexpr std::pair<std::string_view, PageLayout> kLayouts[] = {
    {"layer_first", PageLayout::layer_first},
    {"page_first", PageLayout::page_first},
    {"page_first_direct", PageLayout::page_first_direct},
    {"page_head", PageLayout::page_head},
};

std::string name_of(PageLayout layout) {
  for (const auto& [name, value] : kLayouts) {
    if (value == layout) return std::string(name);
  }
  return "unknown";
}

}  // namespace

Result<IoBackend> parse_io_backend(std::string_view name) {
  if (name == "kernel") return IoBackend::kernel;
  if (name == "direct") return IoBackend::direct;
  return bad("Unsupported io backend: " + std::string(name) + ", expected kernel or direct");
}

Result<PageLayout> parse_page_layout(std::string_view name) {
  for (const auto& [known, value] : kLayouts) {
    if (known == name) return value;
  }
  return bad("layout '" + std::string(name) +
             "', expected layer_first, page_first, page_first_direct or page_head");
}

Result<MovedIndices> move_indices(IoBackend backend, PageLayout layout, std::vector<std::uint64_t> host,
                                  std::vector<std::uint64_t> device) {
  if (host.size() != device.size()) {
    return bad(std::to_string(host.size()) + " host and " + std::to_string(device.size()) +
               " device slots, expected as many of both");
  }
  if (backend == IoBackend::kernel) return MovedIndices{std::move(host), std::move(device), true};
  if (layout == PageLayout::page_first_direct) {
    return MovedIndices{std::move(host), std::move(device), false};
  }
  if (layout != PageLayout::layer_first) {
    return bad("io backend direct with layout " + name_of(layout) +
               ", expected layer_first or page_first_direct");
  }
  std::vector<std::size_t> order(host.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return host[a] < host[b]; });
  MovedIndices moved;
  moved.host.reserve(host.size());
  moved.device.reserve(host.size());
  for (const std::size_t i : order) {
    moved.host.push_back(host[i]);
    moved.device.push_back(device[i]);
  }
  return moved;
}

std::vector<IndexRun> coalesce_runs(std::span<const std::uint64_t> source,
                                    std::span<const std::uint64_t> destination) {
  std::vector<IndexRun> runs;
  for (std::size_t i = 0; i < std::min(source.size(), destination.size()); ++i) {
    if (!runs.empty()) {
      IndexRun& last = runs.back();
      if (source[i] == last.source + last.length && destination[i] == last.destination + last.length) {
        ++last.length;
        continue;
      }
    }
    runs.push_back({source[i], destination[i], 1});
  }
  return runs;
}

Result<KernelLaunch> kernel_launch(std::uint32_t items, std::uint32_t block_quota,
                                   std::uint32_t warps_per_block) {
  if (items == 0 || block_quota == 0 || warps_per_block == 0) {
    return bad(std::to_string(items) + " items, a quota of " + std::to_string(block_quota) + " blocks, " +
               std::to_string(warps_per_block) + " warps a block; expected each to be at least 1");
  }
  const auto divide_up = [](std::uint64_t a, std::uint64_t b) {
    return static_cast<std::uint32_t>((a + b - 1) / b);
  };
  KernelLaunch launch;
  launch.items_per_warp = divide_up(items, std::uint64_t{block_quota} * warps_per_block);
  launch.blocks = divide_up(items, std::uint64_t{launch.items_per_warp} * warps_per_block);
  launch.threads = 32 * warps_per_block;
  return launch;
}

Result<std::vector<std::uint32_t>> page_head_ranks(std::uint32_t tp_lcm_size, std::uint32_t tp_size,
                                                   std::uint32_t tp_rank) {
  if (tp_size == 0 || tp_lcm_size == 0 || tp_lcm_size % tp_size != 0 || tp_rank >= tp_size) {
    return bad("rank " + std::to_string(tp_rank) + " of " + std::to_string(tp_size) +
               " with a common size of " + std::to_string(tp_lcm_size) +
               "; expected a rank below the size, and a size that divides the common one");
  }
  const std::uint32_t factor = tp_lcm_size / tp_size;
  std::vector<std::uint32_t> ranks(factor);
  std::iota(ranks.begin(), ranks.end(), tp_rank * factor);
  return ranks;
}

}  // namespace hicache
