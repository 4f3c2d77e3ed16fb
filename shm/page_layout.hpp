// Byte offsets of SGLang's host pool layouts, as pure functions. hicache's pool is page-contiguous; these
// describe device geometry, storage files and the token-slot view. Rules: behaviour of SGLang's host pools
// (0.5.2, 0.5.3).
#pragma once

#include <cstdint>
#include <vector>

#include "shm/status.hpp"

namespace hicache {

enum class PageLayout : std::uint32_t { layer_first, page_first, page_first_direct, page_head };

// Shape of an MHA pool: sizes in elements except item_bytes. slots is a multiple of page_tokens.
struct MhaShape {
  std::uint64_t layers = 0;
  std::uint64_t slots = 0;
  std::uint64_t heads = 0;
  std::uint64_t head_dim = 0;
  std::uint64_t page_tokens = 0;
  std::uint64_t item_bytes = 0;

  [[nodiscard]] std::uint64_t half_bytes() const { return layers * slots * heads * head_dim * item_bytes; }
  [[nodiscard]] std::uint64_t total_bytes() const { return 2 * half_bytes(); }
  [[nodiscard]] std::uint64_t bytes_per_token() const { return 2 * layers * heads * head_dim * item_bytes; }
};

// Shape of an MLA pool: `channels` = latent rank + rope dimensions.
struct MlaShape {
  std::uint64_t layers = 0;
  std::uint64_t slots = 0;
  std::uint64_t channels = 0;
  std::uint64_t page_tokens = 0;
  std::uint64_t item_bytes = 0;

  [[nodiscard]] std::uint64_t total_bytes() const { return layers * slots * channels * item_bytes; }
  [[nodiscard]] std::uint64_t bytes_per_token() const { return layers * channels * item_bytes; }
};

// Byte offset of one element. kv: 0 = K, 1 = V.
std::uint64_t mha_offset(const MhaShape& shape, PageLayout layout, std::uint64_t kv, std::uint64_t layer,
                         std::uint64_t token, std::uint64_t head, std::uint64_t channel);
// page_head does not exist for MLA: invalid_argument.
Result<std::uint64_t> mla_offset(const MlaShape& shape, PageLayout layout, std::uint64_t layer,
                                 std::uint64_t token, std::uint64_t channel);
// MLA with latent and rope in separate buffers (K and V of page_first_kv_split): offset inside the named
// buffer.
std::uint64_t mla_kv_split_offset(const MlaShape& shape, std::uint64_t layer, std::uint64_t token,
                                  std::uint64_t channel);

// A contiguous extent of a pool.
struct PageExtent {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  friend bool operator==(const PageExtent&, const PageExtent&) = default;
};

// Extents of pages given by their first tokens, in the order in which a storage backend gets them: K then V
// of each page; for layer_first K then V of each layer of each page; for page_head with split_factor > 1, K
// then V of each head group. split_factor must divide heads and is 1 for other layouts.
Result<std::vector<PageExtent>> mha_page_extents(const MhaShape& shape, PageLayout layout,
                                                 const std::vector<std::uint64_t>& first_tokens,
                                                 std::uint64_t split_factor = 1);
Result<std::vector<PageExtent>> mla_page_extents(const MlaShape& shape, PageLayout layout,
                                                 const std::vector<std::uint64_t>& first_tokens);

}  // namespace hicache
