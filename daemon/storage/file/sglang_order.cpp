#include "daemon/storage/file/sglang_order.hpp"

#include <cassert>
#include <cstdint>
#include <cstring>

namespace hicache::daemon {
namespace {

// Calls copy(offset in the pool's order, offset in the file's order, bytes) for every run that is contiguous
// in both.
template <class Copy>
void for_each_run(const NamespaceSpec& spec, PageLayout layout, Copy&& copy) {
  if (same_order(layout)) return copy(0, 0, spec.shard_bytes());
  assert(layout == PageLayout::page_first);
  const std::uint64_t layers = spec.layers;
  const std::uint64_t tokens = spec.page_tokens;
  const std::uint64_t row = spec.piece_bytes() / tokens;  // heads and channels of one token in one layer
  for (std::uint64_t kind = 0; kind < spec.kinds(); ++kind) {
    for (std::uint64_t token = 0; token < tokens; ++token) {
      for (std::uint64_t layer = 0; layer < layers; ++layer) {
        copy(((kind * layers + layer) * tokens + token) * row,
             ((kind * tokens + token) * layers + layer) * row, row);
      }
    }
  }
}

}  // namespace

void pool_to_sglang(const NamespaceSpec& spec, PageLayout layout, std::span<const std::byte> pool,
                    std::span<std::byte> file) {
  assert(pool.size() == spec.shard_bytes() && file.size() == spec.shard_bytes());
  for_each_run(spec, layout, [&](std::uint64_t in_pool, std::uint64_t in_file, std::uint64_t bytes) {
    std::memcpy(file.data() + in_file, pool.data() + in_pool, bytes);
  });
}

void sglang_to_pool(const NamespaceSpec& spec, PageLayout layout, std::span<const std::byte> file,
                    std::span<std::byte> pool) {
  assert(pool.size() == spec.shard_bytes() && file.size() == spec.shard_bytes());
  for_each_run(spec, layout, [&](std::uint64_t in_pool, std::uint64_t in_file, std::uint64_t bytes) {
    std::memcpy(pool.data() + in_pool, file.data() + in_file, bytes);
  });
}

}  // namespace hicache::daemon
