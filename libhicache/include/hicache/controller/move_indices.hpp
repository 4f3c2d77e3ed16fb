// How index lists are prepared for a copy, and what the copies are: runs for memcpy, warps for a kernel.
// Pure functions; thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "hicache/export.h"
#include "hicache/io_backend.hpp"
#include "shm/page_layout.hpp"
#include "shm/status.hpp"

namespace hicache {

// "kernel" or "direct"; invalid_argument "Unsupported io backend" for any other text.
HICACHE_EXPORT Result<IoBackend> parse_io_backend(std::string_view name);
// "layer_first", "page_first", "page_first_direct" or "page_head".
HICACHE_EXPORT Result<PageLayout> parse_page_layout(std::string_view name);

struct MovedIndices {
  std::vector<std::uint64_t> host;
  std::vector<std::uint64_t> device;
  bool host_list_on_device = false;  // kernel: the GPU reads both lists
};

// kernel: both lists as they are, read on the device. direct: both on the CPU; for layer_first the host list
// is sorted and the device list permuted the same way, for page_first_direct they stay. invalid_argument for
// lists of different lengths and for layouts that direct does not have.
HICACHE_EXPORT Result<MovedIndices> move_indices(IoBackend backend, PageLayout layout,
                                                 std::vector<std::uint64_t> host,
                                                 std::vector<std::uint64_t> device);

// A maximal stretch in which both lists grow by one.
struct IndexRun {
  std::uint64_t source = 0;
  std::uint64_t destination = 0;
  std::uint64_t length = 0;
  friend bool operator==(const IndexRun&, const IndexRun&) = default;
};
HICACHE_EXPORT std::vector<IndexRun> coalesce_runs(std::span<const std::uint64_t> source,
                                                   std::span<const std::uint64_t> destination);

// Launch of a copy kernel of `items` items: every warp takes items_per_warp of them.
struct KernelLaunch {
  std::uint32_t items_per_warp = 0;
  std::uint32_t blocks = 0;
  std::uint32_t threads = 0;  // of a block
  friend bool operator==(const KernelLaunch&, const KernelLaunch&) = default;
};
// invalid_argument when a number is 0.
HICACHE_EXPORT Result<KernelLaunch> kernel_launch(std::uint32_t items, std::uint32_t block_quota = 2,
                                                  std::uint32_t warps_per_block = 32);

// Ranks of the least common multiple of all TP sizes under whose names a rank of one size keeps its heads, so
// that groups of different sizes share page_head pages. invalid_argument when tp_size does not divide it.
HICACHE_EXPORT Result<std::vector<std::uint32_t>> page_head_ranks(std::uint32_t tp_lcm_size,
                                                                  std::uint32_t tp_size,
                                                                  std::uint32_t tp_rank);

}  // namespace hicache
