#include "daemon/transfer/planner.hpp"

#include <algorithm>
#include <cassert>
#include <limits>
#include <numeric>
#include <tuple>

namespace hicache::daemon {
namespace {

// A part of every page that is one pitched piece on both sides. In device page p it lies at device + p *
// page_stride, in a host page at the page's offset + host.
struct Block {
  std::uint32_t allocation = 0;
  bool states = false;  // of pages' states: device pages are state slots
  std::uint32_t first_layer = 0;
  std::uint32_t last_layer = 0;
  std::uint64_t device = 0;
  std::uint64_t page_stride = 0;
  std::uint64_t host = 0;
  std::uint64_t width = 0;
  std::uint64_t rows = 1;
  std::uint64_t device_pitch = 0;
  std::uint64_t host_pitch = 0;

  [[nodiscard]] std::uint64_t device_of(const PagePair& page) const {
    return device + page.device.value * page_stride;
  }
  [[nodiscard]] std::uint64_t host_of(const PagePair& page) const { return page.host.value + host; }
};

Block block_of(const NamespaceSpec& spec, const DeviceTensor& tensor) {
  Block block;
  block.allocation = tensor.allocation;
  block.states = holds_states(spec, tensor);
  block.first_layer = announced_with(spec, tensor);
  block.last_layer = block.first_layer;
  block.device = tensor.offset;
  block.page_stride = tensor.page_stride;
  block.host = shard_piece_offset(spec, tensor);
  block.width = tensor.page_bytes;
  block.device_pitch = tensor.page_bytes;
  block.host_pitch = tensor.page_bytes;
  return block;
}

// Only blocks that keep their distance in every page can be one copy.
bool move_together(const Block& a, const Block& b) {
  return a.allocation == b.allocation && a.page_stride == b.page_stride && a.states == b.states;
}

void join_layers(Block& block, const Block& next) {
  block.first_layer = std::min(block.first_layer, next.first_layer);
  block.last_layer = std::max(block.last_layer, next.last_layer);
}

// Joins `next` to `block` when it follows without a gap on both sides.
bool join_contiguous(Block& block, const Block& next) {
  if (!move_together(block, next)) return false;
  if (block.device + block.width != next.device || block.host + block.width != next.host) return false;
  block.width += next.width;
  join_layers(block, next);
  return true;
}

// Joins `next` as one more row when it keeps the pitch of the rows so far on both sides.
bool join_pitched(Block& block, const Block& next) {
  if (!move_together(block, next) || block.width != next.width) return false;
  const std::uint64_t last_device = block.device + (block.rows - 1) * block.device_pitch;
  const std::uint64_t last_host = block.host + (block.rows - 1) * block.host_pitch;
  if (next.device < last_device + block.width || next.host < last_host + block.width) return false;
  const std::uint64_t device_pitch = next.device - last_device;
  const std::uint64_t host_pitch = next.host - last_host;
  if (block.rows > 1 && (device_pitch != block.device_pitch || host_pitch != block.host_pitch)) return false;
  block.device_pitch = device_pitch;
  block.host_pitch = host_pitch;
  ++block.rows;
  join_layers(block, next);
  return true;
}

template <class Join>
void join_neighbours(std::vector<Block>& blocks, Join join) {
  std::size_t kept = 0;
  for (std::size_t i = 1; i < blocks.size(); ++i) {
    if (join(blocks[kept], blocks[i])) continue;
    ++kept;
    blocks[kept] = blocks[i];
  }
  blocks.resize(std::min(blocks.size(), kept + 1));
}

// The blocks of a page's layers [first_layer, end_layer): few and wide where the tensors allow it.
std::vector<Block> page_blocks(const NamespaceSpec& spec, const DeviceGeometry& geometry,
                               std::uint32_t first_layer, std::uint32_t end_layer) {
  std::vector<Block> blocks;
  blocks.reserve(geometry.tensors.size());
  for (const auto& tensor : geometry.tensors) {
    const std::uint32_t layer = announced_with(spec, tensor);
    if (layer >= first_layer && layer < end_layer) blocks.push_back(block_of(spec, tensor));
  }
  std::sort(blocks.begin(), blocks.end(), [](const Block& a, const Block& b) { return a.host < b.host; });
  join_neighbours(blocks, join_contiguous);
  // Rows of one block must be equally wide: contiguous joins come first, so that a page whose layers lie in
  // pairs becomes rows of pairs.
  join_neighbours(blocks, join_pitched);
  return blocks;
}

// First byte of the pool after `host` that a run beginning there may not touch.
std::uint64_t window_end(std::uint64_t host, std::uint64_t border_bytes) {
  if (border_bytes == 0) return std::numeric_limits<std::uint64_t>::max();
  return (host / border_bytes + 1) * border_bytes;
}

class RunWriter {
 public:
  RunWriter(std::uint64_t border_bytes, CopyPlan& plan) : border_(border_bytes), plan_(plan) {}

  // Pages one after the other, each with all rows of the block.
  void each_page(const Block& block, std::span<const PagePair> pages) {
    for (const auto& page : pages) {
      append(run_of(block, block.device_of(page), block.host_of(page), block.rows, block.device_pitch,
                    block.host_pitch));
    }
  }

  // A one-row block: pages at a constant distance on both sides become the rows of one run. Taking as many as
  // fit each time gives the fewest runs, since every part of such a run is one too.
  void joined_pages(const Block& block, std::span<const PagePair> pages) {
    for (std::size_t i = 0; i < pages.size();) {
      const std::uint64_t device = block.device_of(pages[i]);
      const std::uint64_t host = block.host_of(pages[i]);
      const std::uint64_t end = window_end(host, border_);
      std::uint64_t last_device = device;
      std::uint64_t last_host = host;
      std::uint64_t device_pitch = block.width;
      std::uint64_t host_pitch = block.width;
      std::uint64_t rows = 1;
      for (++i; i < pages.size(); ++i, ++rows) {
        const std::uint64_t next_device = block.device_of(pages[i]);
        const std::uint64_t next_host = block.host_of(pages[i]);
        if (next_device < last_device + block.width || next_host < last_host + block.width) break;
        if (next_host + block.width > end) break;
        if (rows > 1 && (next_device - last_device != device_pitch || next_host - last_host != host_pitch))
          break;
        device_pitch = next_device - last_device;
        host_pitch = next_host - last_host;
        last_device = next_device;
        last_host = next_host;
      }
      append(run_of(block, device, host, rows, device_pitch, host_pitch));
    }
  }

 private:
  static CopyRun run_of(const Block& block, std::uint64_t device, std::uint64_t host, std::uint64_t rows,
                        std::uint64_t device_pitch, std::uint64_t host_pitch) {
    CopyRun run;
    run.allocation = block.allocation;
    run.device_offset = device;
    run.host_offset = host;
    run.width = block.width;
    run.rows = rows;
    run.device_pitch = device_pitch;
    run.host_pitch = host_pitch;
    run.first_layer = block.first_layer;
    run.last_layer = block.last_layer;
    return run;
  }

  // Adds a run, cut wherever it would cross a border.
  void append(CopyRun run) {
    for (;;) {
      const std::uint64_t room = window_end(run.host_offset, border_) - run.host_offset;
      const bool first_row_fits = run.width <= room;
      const std::uint64_t rows =
          first_row_fits ? std::min(run.rows, (room - run.width) / run.host_pitch + 1) : 1;
      if (first_row_fits) {
        push(run, rows);
      } else {
        append_row(run);
      }
      if (rows == run.rows) return;
      run.rows -= rows;
      run.device_offset += rows * run.device_pitch;
      run.host_offset += rows * run.host_pitch;
    }
  }

  // Adds the first row of a run, in parts.
  void append_row(CopyRun run) {
    std::uint64_t left = run.width;
    while (left > 0) {
      run.width = std::min(left, window_end(run.host_offset, border_) - run.host_offset);
      push(run, 1);
      left -= run.width;
      run.device_offset += run.width;
      run.host_offset += run.width;
    }
  }

  void push(CopyRun run, std::uint64_t rows) {
    run.rows = rows;
    if (run.device_pitch == run.width && run.host_pitch == run.width) {
      run.width *= run.rows;
      run.rows = 1;
    }
    if (run.rows == 1) run.device_pitch = run.host_pitch = run.width;
    plan_.bytes += run.bytes();
    plan_.runs.push_back(run);
  }

  std::uint64_t border_;
  CopyPlan& plan_;
};

bool page_before(const PagePair& a, const PagePair& b) {
  return std::tie(a.host.value, a.device.value) < std::tie(b.host.value, b.device.value);
}

// The pages in plan order: themselves, or a sorted copy in `storage`.
std::span<const PagePair> in_order(std::span<const PagePair> pages, std::vector<PagePair>& storage) {
  if (std::is_sorted(pages.begin(), pages.end(), page_before)) return pages;
  storage.assign(pages.begin(), pages.end());
  sort_pages(storage);
  return storage;
}

void sort_runs(std::vector<CopyRun>& runs, std::size_t first) {
  std::sort(runs.begin() + static_cast<std::ptrdiff_t>(first), runs.end(),
            [](const CopyRun& a, const CopyRun& b) {
              return std::tie(a.host_offset, a.allocation, a.device_offset) <
                     std::tie(b.host_offset, b.allocation, b.device_offset);
            });
}

// The pages whose states are copied, in the same order, with their state slots in the place of device pages.
std::vector<PagePair> pages_with_states(const NamespaceSpec& spec, std::span<const PagePair> pages) {
  std::vector<PagePair> found;
  if (!spec.has_states()) return found;
  for (const PagePair& page : pages) {
    if (page.state) found.push_back({page.state, page.host, page.state});
  }
  return found;
}

void append_pages(const NamespaceSpec& spec, const DeviceGeometry& geometry, std::span<const PagePair> pages,
                  std::uint32_t first_layer, std::uint32_t end_layer, std::uint64_t border_bytes,
                  CopyPlan& plan) {
  RunWriter writer(border_bytes, plan);
  const auto with_states = pages_with_states(spec, pages);
  for (const auto& block : page_blocks(spec, geometry, first_layer, end_layer)) {
    const auto moved = block.states ? std::span<const PagePair>(with_states) : pages;
    if (block.rows > 1) {
      writer.each_page(block, moved);
    } else {
      writer.joined_pages(block, moved);
    }
  }
  sort_runs(plan.runs, 0);
}

void append_layer(const NamespaceSpec& spec, const DeviceGeometry& geometry, std::span<const PagePair> pages,
                  std::uint32_t layer, std::uint64_t border_bytes, CopyPlan& plan) {
  const std::size_t first = plan.runs.size();
  RunWriter writer(border_bytes, plan);
  const auto with_states = pages_with_states(spec, pages);
  for (const auto& tensor : geometry.tensors) {
    if (announced_with(spec, tensor) != layer) continue;
    const Block block = block_of(spec, tensor);
    writer.joined_pages(block, block.states ? std::span<const PagePair>(with_states) : pages);
  }
  sort_runs(plan.runs, first);
}

}  // namespace

void sort_pages(std::span<PagePair> pages) {
  // The usual case: a request's slots follow each other in the pool.
  if (std::is_sorted(pages.begin(), pages.end(), page_before)) return;
  std::sort(pages.begin(), pages.end(), page_before);
}

void plan_pages(const NamespaceSpec& spec, const DeviceGeometry& geometry, std::span<const PagePair> pages,
                std::uint64_t border_bytes, CopyPlan& plan) {
  plan_group(spec, geometry, pages, 0, spec.layers, border_bytes, plan);
}

void plan_group(const NamespaceSpec& spec, const DeviceGeometry& geometry, std::span<const PagePair> pages,
                std::uint32_t first_layer, std::uint32_t end_layer, std::uint64_t border_bytes,
                CopyPlan& plan) {
  plan.runs.clear();
  plan.bytes = 0;
  std::vector<PagePair> storage;
  append_pages(spec, geometry, in_order(pages, storage), first_layer, end_layer, border_bytes, plan);
}

void plan_packed(std::span<const PackedPart> parts, std::uint64_t row_bytes, std::span<const PagePair> pages,
                 std::uint64_t border_bytes, CopyPlan& plan) {
  plan.runs.clear();
  plan.bytes = 0;
  std::vector<PagePair> rows;
  rows.reserve(pages.size());
  for (std::uint32_t i = 0; i < pages.size(); ++i) rows.push_back({DevicePage{i}, pages[i].host});
  RunWriter writer(border_bytes, plan);
  for (const PackedPart& part : parts) {
    Block block;
    block.device = part.device;
    block.page_stride = row_bytes;
    block.host = part.host;
    block.width = part.width;
    writer.joined_pages(block, rows);
  }
}

GroupShape group_shape(const NamespaceSpec& spec, const DeviceGeometry& geometry, std::uint32_t first_layer,
                       std::uint32_t end_layer) {
  GroupShape shape;
  for (const auto& block : page_blocks(spec, geometry, first_layer, end_layer)) {
    if (block.states) continue;
    ++(block.rows > 1 ? shape.pitched : shape.contiguous);
    shape.rows += static_cast<std::uint32_t>(block.rows);
  }
  return shape;
}

void plan_layer(const NamespaceSpec& spec, const DeviceGeometry& geometry, std::span<const PagePair> pages,
                std::uint32_t layer, std::uint64_t border_bytes, CopyPlan& plan) {
  plan.runs.clear();
  plan.bytes = 0;
  std::vector<PagePair> storage;
  append_layer(spec, geometry, in_order(pages, storage), layer, border_bytes, plan);
}

CopyPlan plan_copy(const NamespaceSpec& spec, const DeviceGeometry& geometry, std::span<const PagePair> pages,
                   PlanOrder order, std::uint64_t border_bytes) {
  CopyPlan plan;
  std::vector<PagePair> storage;
  const auto sorted = in_order(pages, storage);
  if (order == PlanOrder::page_major) {
    append_pages(spec, geometry, sorted, 0, spec.layers, border_bytes, plan);
  } else {
    for (std::uint32_t layer = 0; layer < spec.layers; ++layer) {
      append_layer(spec, geometry, sorted, layer, border_bytes, plan);
    }
  }
  return plan;
}

std::vector<IndexRun> coalesce_runs(std::span<const std::int64_t> source,
                                    std::span<const std::int64_t> destination) {
  assert(source.size() == destination.size());
  std::vector<IndexRun> runs;
  for (std::size_t i = 0; i < source.size(); ++i) {
    if (!runs.empty()) {
      IndexRun& run = runs.back();
      if (source[i] == run.source + run.length && destination[i] == run.destination + run.length) {
        ++run.length;
        continue;
      }
    }
    runs.push_back({source[i], destination[i], 1});
  }
  return runs;
}

void sort_by_host(std::vector<std::int64_t>& host, std::vector<std::int64_t>& device) {
  assert(host.size() == device.size());
  std::vector<std::size_t> order(host.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return host[a] < host[b]; });
  std::vector<std::int64_t> sorted_host(host.size());
  std::vector<std::int64_t> sorted_device(device.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    sorted_host[i] = host[order[i]];
    sorted_device[i] = device[order[i]];
  }
  host = std::move(sorted_host);
  device = std::move(sorted_device);
}

}  // namespace hicache::daemon
