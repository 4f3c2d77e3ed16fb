// The byte order of a page in SGLang's host pools and files, and the one of hicache's pool.
#pragma once

#include <cstddef>
#include <span>

#include "shm/namespace_spec.hpp"
#include "shm/page_layout.hpp"

namespace hicache::daemon {

// A shard of hicache's pool is [K, V][layer][token][head][dim] (the latent alone for MLA). So is a flat page
// of SGLang's layer_first and page_first_direct; of page_first it is [K, V][token][layer][head][dim].
constexpr bool same_order(PageLayout layout) {
  return layout == PageLayout::layer_first || layout == PageLayout::page_first_direct;
}

// Copies a shard. Preconditions: both have spec.shard_bytes() bytes and do not overlap; layout is one of the
// three.
void pool_to_sglang(const NamespaceSpec& spec, PageLayout layout, std::span<const std::byte> pool,
                    std::span<std::byte> file);
void sglang_to_pool(const NamespaceSpec& spec, PageLayout layout, std::span<const std::byte> file,
                    std::span<std::byte> pool);

}  // namespace hicache::daemon
