// From the geometries of two ranks and a list of pages to copies between their memories. Pure code, as the
// planner is.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "shm/device_geometry.hpp"
#include "shm/namespace_spec.hpp"
#include "shm/types.hpp"

namespace hicache::daemon {

// A pitched copy from one rank's memory to another's. One row = contiguous; its pitches equal its width.
struct PeerRun {
  std::uint32_t from_allocation = 0;
  std::uint32_t to_allocation = 0;
  std::uint64_t from_offset = 0;
  std::uint64_t to_offset = 0;
  std::uint64_t width = 0;
  std::uint64_t rows = 1;
  std::uint64_t from_pitch = 0;
  std::uint64_t to_pitch = 0;

  [[nodiscard]] std::uint64_t bytes() const { return width * rows; }
  friend bool operator==(const PeerRun&, const PeerRun&) = default;
};

// Plans the copy of layers [first_layer, end_layer) of pages from[i] of one rank to pages to[i] of another,
// in as few copies as it can: a page's layers in one where they have a constant distance on both sides, or a
// layer of consecutive pages in one. Appends to `out`.
// Precondition: both geometries were validated against spec, the lists are equally long, and every page is
// below its geometry's pages.
void plan_peer_copies(const NamespaceSpec& spec, const DeviceGeometry& from_geometry,
                      const DeviceGeometry& to_geometry, std::span<const DevicePage> from,
                      std::span<const DevicePage> to, std::uint32_t first_layer, std::uint32_t end_layer,
                      std::vector<PeerRun>& out);

}  // namespace hicache::daemon
