#include "daemon/transfer/staged_plan.hpp"

#include <algorithm>
#include <cassert>
#include <vector>

#include "shm/device_geometry.hpp"
#include "shm/staging_layout.hpp"

namespace hicache::daemon {

std::uint64_t staged_row_bytes(const NamespaceSpec& spec, std::uint32_t layers) {
  return std::uint64_t{spec.kinds()} * layers * spec.piece_bytes();
}

bool can_stage(const NamespaceSpec& spec, std::uint64_t slot_bytes) {
  return staged_row_bytes(spec, 1) <= slot_bytes;
}

namespace {

// Layers of a chunk: all of the group's where a page of them fits a slot, because a group that is the whole
// page makes the chunk one contiguous copy, else the fewest equal cuts. Fuller slots are not worth a cut:
// rows that are apart in the pool cost more than a slot that is not full.
std::uint32_t chunk_layers(const NamespaceSpec& spec, std::uint32_t group, std::uint64_t slot_bytes) {
  const std::uint64_t fit = slot_bytes / staged_row_bytes(spec, 1);
  const std::uint64_t cuts = (group + fit - 1) / fit;
  return static_cast<std::uint32_t>((group + cuts - 1) / cuts);
}

}  // namespace

StagedChunk next_staged_chunk(const NamespaceSpec& spec, std::uint32_t first_layer, std::uint32_t group_end,
                              std::size_t done, std::size_t pages, std::uint64_t slot_bytes) {
  assert(can_stage(spec, slot_bytes) && first_layer < group_end && done < pages);
  const std::uint32_t layers = chunk_layers(spec, group_end - first_layer, slot_bytes);
  StagedChunk chunk;
  chunk.first_layer = first_layer;
  chunk.end_layer = first_layer + layers;
  const std::uint64_t fit = slot_bytes / staged_row_bytes(spec, layers);
  chunk.first_page = done;
  chunk.end_page = done + static_cast<std::size_t>(std::min(
                              {fit, std::uint64_t{kStagingChunkPages}, std::uint64_t{pages - done}}));
  return chunk;
}

void plan_staged_copies(const NamespaceSpec& spec, const StagedChunk& chunk, std::span<const PagePair> pages,
                        std::uint64_t slot_offset, std::uint64_t border_bytes, CopyPlan& plan) {
  const std::uint32_t layers = chunk.end_layer - chunk.first_layer;
  const std::uint64_t half = layers * spec.piece_bytes();
  std::vector<PackedPart> parts;
  if (spec.attention == Attention::mla) {
    parts.push_back({shard_piece_offset(spec, chunk.first_layer, TensorKind::latent), slot_offset, half});
  } else if (layers == spec.layers) {
    parts.push_back({0, slot_offset, 2 * half});  // V follows K
  } else {
    parts.push_back({shard_piece_offset(spec, chunk.first_layer, TensorKind::k), slot_offset, half});
    parts.push_back({shard_piece_offset(spec, chunk.first_layer, TensorKind::v), slot_offset + half, half});
  }
  plan_packed(parts, staged_row_bytes(spec, layers), pages, border_bytes, plan);
}

}  // namespace hicache::daemon
