// The transfer planner: from device geometry and a list of pages to copy runs. Pure code, no memory is
// touched.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "shm/device_geometry.hpp"
#include "shm/namespace_spec.hpp"
#include "shm/types.hpp"

namespace hicache::daemon {

enum class Direction : std::uint8_t {
  write,  // device to host
  load,   // host to device
};

// One page to move: a device page and the pool offset of the rank's shard of the host page.
struct PagePair {
  DevicePage device;
  PoolOffset host;
  DevicePage state{};  // slot of its states in the tensors of trailing pools; none = they are not copied
};

// A pitched copy: `rows` rows of `width` bytes, `device_pitch` and `host_pitch` bytes apart. One row =
// contiguous; its pitches equal its width, because copy engines want a pitch that is at least the width.
struct CopyRun {
  std::uint32_t allocation = 0;
  std::uint64_t device_offset = 0;
  std::uint64_t host_offset = 0;  // into the pool
  std::uint64_t width = 0;
  std::uint64_t rows = 1;
  std::uint64_t device_pitch = 0;
  std::uint64_t host_pitch = 0;
  std::uint32_t first_layer = 0;  // layers this run belongs to: [first_layer, last_layer]
  std::uint32_t last_layer = 0;

  [[nodiscard]] std::uint64_t bytes() const { return width * rows; }
  friend bool operator==(const CopyRun&, const CopyRun&) = default;
};

enum class PlanOrder : std::uint8_t {
  page_major,   // all layers of a page together: fewest copies where layers have a constant stride
  layer_major,  // a layer of all pages together: layers become complete in order
};

struct CopyPlan {
  std::vector<CopyRun> runs;  // for layer_major: sorted by last_layer
  std::uint64_t bytes = 0;
};

// Plans the copy of `pages`. Runs are coalesced (neighbours on both sides become one wider run or one pitched
// run) and sorted by host offset inside a layer. No run crosses `border_bytes` of the pool (a segment or
// registration border; 0 = none). Precondition: geometry was validated against spec and every device page is
// below geometry.pages.
CopyPlan plan_copy(const NamespaceSpec& spec, const DeviceGeometry& geometry, std::span<const PagePair> pages,
                   PlanOrder order, std::uint64_t border_bytes);
// The same in parts, for a caller that plans as it copies; `plan` is overwritten and its memory used again.
// Pages that are sorted by host offset are taken as they are; others are copied and sorted first.
void plan_pages(const NamespaceSpec& spec, const DeviceGeometry& geometry, std::span<const PagePair> pages,
                std::uint64_t border_bytes, CopyPlan& plan);  // as page_major
void plan_layer(const NamespaceSpec& spec, const DeviceGeometry& geometry, std::span<const PagePair> pages,
                std::uint32_t layer, std::uint64_t border_bytes, CopyPlan& plan);  // one layer of layer_major
// One group of layers of page_major: [first_layer, end_layer).
void plan_group(const NamespaceSpec& spec, const DeviceGeometry& geometry, std::span<const PagePair> pages,
                std::uint32_t first_layer, std::uint32_t end_layer, std::uint64_t border_bytes,
                CopyPlan& plan);
// A part of every page's shard that lies at `host` of it, and at `device` + i * row_bytes for the i-th page
// of a list: pages that are packed one behind the other.
struct PackedPart {
  std::uint64_t host = 0;
  std::uint64_t device = 0;
  std::uint64_t width = 0;
};
// The copies of packed pages, taken in the list's order; `plan` is overwritten.
void plan_packed(std::span<const PackedPart> parts, std::uint64_t row_bytes, std::span<const PagePair> pages,
                 std::uint64_t border_bytes, CopyPlan& plan);
// How many copies page_major needs for a group of layers.
struct GroupShape {
  std::uint32_t pitched = 0;     // copies for each page, each with several rows
  std::uint32_t contiguous = 0;  // copies for each run of pages that lie behind each other on both sides
  std::uint32_t rows = 0;        // rows of a page in all of them
  // States are not counted: few pages have any.
};
GroupShape group_shape(const NamespaceSpec& spec, const DeviceGeometry& geometry, std::uint32_t first_layer,
                       std::uint32_t end_layer);
// The order in which plans take pages: by host offset, then by device page.
void sort_pages(std::span<PagePair> pages);

// Maximal runs of a token index list (both lists equally long) where host and device both advance by one (the
// seed's `direct` backend).
struct IndexRun {
  std::int64_t source = 0;
  std::int64_t destination = 0;
  std::int64_t length = 0;
  friend bool operator==(const IndexRun&, const IndexRun&) = default;
};
std::vector<IndexRun> coalesce_runs(std::span<const std::int64_t> source,
                                    std::span<const std::int64_t> destination);
// Sorts host indices ascending and permutes device indices the same way (stable).
void sort_by_host(std::vector<std::int64_t>& host, std::vector<std::int64_t>& device);

}  // namespace hicache::daemon
