// How a transfer through staging memory is cut into chunks, and the copies of a chunk. Pure code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "daemon/transfer/planner.hpp"
#include "shm/namespace_spec.hpp"

namespace hicache::daemon {

// Some layers of some pages: what one slot of staging memory holds.
struct StagedChunk {
  std::uint32_t first_layer = 0;  // [first_layer, end_layer)
  std::uint32_t end_layer = 0;
  std::size_t first_page = 0;  // [first_page, end_page) of the transfer's pages
  std::size_t end_page = 0;
};

// True when a layer of one page fits a slot: less can't be staged.
bool can_stage(const NamespaceSpec& spec, std::uint64_t slot_bytes);

// The chunk that follows `done` pages of the layers [first_layer, ...) of a group that ends at `group_end`:
// all of its layers where they fit a slot, then as many pages as fit. Preconditions: can_stage, first_layer <
// group_end, done < pages.
StagedChunk next_staged_chunk(const NamespaceSpec& spec, std::uint32_t first_layer, std::uint32_t group_end,
                              std::size_t done, std::size_t pages, std::uint64_t slot_bytes);

// The copies between a chunk's pages in the pool and a slot that begins at `slot_offset` of the staging
// memory; `plan` is overwritten, its runs' device offsets count from the staging memory's start. `pages` are
// the chunk's. No run crosses `border_bytes` of the pool (0 = none).
void plan_staged_copies(const NamespaceSpec& spec, const StagedChunk& chunk, std::span<const PagePair> pages,
                        std::uint64_t slot_offset, std::uint64_t border_bytes, CopyPlan& plan);

// Bytes that a page has in a slot, for `layers` layers.
std::uint64_t staged_row_bytes(const NamespaceSpec& spec, std::uint32_t layers);

}  // namespace hicache::daemon
