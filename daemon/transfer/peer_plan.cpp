#include "daemon/transfer/peer_plan.hpp"

#include <cassert>

namespace hicache::daemon {
namespace {

// One tensor on both sides.
struct TensorPair {
  const DeviceTensor* from = nullptr;
  const DeviceTensor* to = nullptr;
};

// Tensors of the layers in order, for each kind: validate() says that there is exactly one of each.
std::vector<TensorPair> tensor_pairs(const NamespaceSpec& spec, const DeviceGeometry& from,
                                     const DeviceGeometry& to, std::uint32_t first_layer,
                                     std::uint32_t end_layer) {
  const std::uint32_t layers = end_layer - first_layer;
  std::vector<TensorPair> pairs(std::size_t{layers} * spec.kinds());
  const auto place = [&](const DeviceTensor& t) -> TensorPair* {
    if (t.layer < first_layer || t.layer >= end_layer) return nullptr;
    const std::size_t kind = t.kind == TensorKind::v ? 1 : 0;
    return &pairs[kind * layers + (t.layer - first_layer)];
  };
  for (const DeviceTensor& t : from.tensors) {
    if (TensorPair* pair = place(t)) pair->from = &t;
  }
  for (const DeviceTensor& t : to.tensors) {
    if (TensorPair* pair = place(t)) pair->to = &t;
  }
  return pairs;
}

// Tensors at a constant distance on both sides, so that a page of all of them is one pitched copy.
struct Block {
  TensorPair first;
  std::uint64_t rows = 1;
  std::uint64_t width = 0;
  std::uint64_t from_pitch = 0;
  std::uint64_t to_pitch = 0;
};

// `next` continues `last` at this distance; 0 when it does not, or goes backwards.
std::uint64_t distance(const DeviceTensor& last, const DeviceTensor& next) {
  const bool same = last.allocation == next.allocation && last.page_stride == next.page_stride;
  return same && next.offset > last.offset ? next.offset - last.offset : 0;
}

std::vector<Block> join_tensors(const std::vector<TensorPair>& pairs) {
  std::vector<Block> blocks;
  const TensorPair* last = nullptr;
  for (const TensorPair& pair : pairs) {
    const std::uint64_t width = pair.from->page_bytes;
    if (last != nullptr) {
      Block& block = blocks.back();
      const std::uint64_t from = distance(*last->from, *pair.from);
      const std::uint64_t to = distance(*last->to, *pair.to);
      const bool fits = block.rows == 1 || (from == block.from_pitch && to == block.to_pitch);
      if (from >= width && to >= width && fits) {
        block.from_pitch = from;
        block.to_pitch = to;
        ++block.rows;
        last = &pair;
        continue;
      }
    }
    blocks.push_back({pair, 1, width, width, width});
    last = &pair;
  }
  for (Block& block : blocks) {
    if (block.from_pitch != block.width || block.to_pitch != block.width) continue;
    block.width *= block.rows;  // without gaps: one row
    block.from_pitch = block.to_pitch = block.width;
    block.rows = 1;
  }
  return blocks;
}

// Pages whose distance is constant and positive on both sides.
struct Stretch {
  std::size_t first = 0;
  std::size_t count = 1;
  std::uint64_t from_step = 0;  // in pages
  std::uint64_t to_step = 0;
};

std::vector<Stretch> join_pages(std::span<const DevicePage> from, std::span<const DevicePage> to) {
  std::vector<Stretch> out;
  for (std::size_t i = 0; i < from.size(); ++i) {
    if (!out.empty()) {
      Stretch& last = out.back();
      const bool ahead = from[i].value > from[i - 1].value && to[i].value > to[i - 1].value;
      const std::uint64_t from_step = ahead ? from[i].value - from[i - 1].value : 0;
      const std::uint64_t to_step = ahead ? to[i].value - to[i - 1].value : 0;
      if (ahead && (last.count == 1 || (from_step == last.from_step && to_step == last.to_step))) {
        last.from_step = from_step;
        last.to_step = to_step;
        ++last.count;
        continue;
      }
    }
    out.push_back({i, 1, 0, 0});
  }
  return out;
}

PeerRun run_of(const TensorPair& pair, DevicePage from, DevicePage to) {
  PeerRun run;
  run.from_allocation = pair.from->allocation;
  run.to_allocation = pair.to->allocation;
  run.from_offset = pair.from->offset + from.value * pair.from->page_stride;
  run.to_offset = pair.to->offset + to.value * pair.to->page_stride;
  return run;
}

void append_stretch(const TensorPair& pair, std::uint64_t width, const Stretch& stretch, DevicePage from,
                    DevicePage to, std::vector<PeerRun>& out) {
  PeerRun run = run_of(pair, from, to);
  run.width = run.from_pitch = run.to_pitch = width;
  if (stretch.count > 1) {
    run.rows = stretch.count;
    run.from_pitch = stretch.from_step * pair.from->page_stride;
    run.to_pitch = stretch.to_step * pair.to->page_stride;
    if (run.from_pitch == width && run.to_pitch == width) {
      run.width = run.from_pitch = run.to_pitch = width * run.rows;
      run.rows = 1;
    }
  }
  out.push_back(run);
}

}  // namespace

void plan_peer_copies(const NamespaceSpec& spec, const DeviceGeometry& from_geometry,
                      const DeviceGeometry& to_geometry, std::span<const DevicePage> from,
                      std::span<const DevicePage> to, std::uint32_t first_layer, std::uint32_t end_layer,
                      std::vector<PeerRun>& out) {
  assert(from.size() == to.size());
  const auto pairs = tensor_pairs(spec, from_geometry, to_geometry, first_layer, end_layer);
  const auto stretches = join_pages(from, to);
  std::size_t next = 0;  // the block's first tensor in `pairs`
  for (const Block& block : join_tensors(pairs)) {
    std::size_t tensors = 0;
    for (std::uint64_t bytes = 0; bytes < block.rows * block.width; ++tensors) {
      bytes += pairs[next + tensors].from->page_bytes;
    }
    if (block.rows == 1) {
      for (const Stretch& s : stretches)
        append_stretch(block.first, block.width, s, from[s.first], to[s.first], out);
    } else if (tensors * stretches.size() < from.size()) {
      for (std::size_t t = 0; t < tensors; ++t) {
        const TensorPair& pair = pairs[next + t];
        for (const Stretch& s : stretches)
          append_stretch(pair, pair.from->page_bytes, s, from[s.first], to[s.first], out);
      }
    } else {
      for (std::size_t i = 0; i < from.size(); ++i) {
        PeerRun run = run_of(block.first, from[i], to[i]);
        run.width = block.width;
        run.rows = block.rows;
        run.from_pitch = block.from_pitch;
        run.to_pitch = block.to_pitch;
        out.push_back(run);
      }
    }
    next += tensors;
  }
}

}  // namespace hicache::daemon
