// What makes KV data incompatible, as a list of named ingredients, and the digest over all of them. Two
// engines share pages exactly when their digests agree.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "shm/status.hpp"
#include "shm/types.hpp"
#include "shm/wire.hpp"

namespace hicache {

enum class Attention : std::uint32_t { mha = 1, mla = 2 };

// When a prefix of a hybrid model counts as present.
enum class HitRule : std::uint32_t {
  all_pages = 1,       // every page has this pool's data: an indexer, draft KV
  trailing_pages = 2,  // only the state after the last page is needed: a recurrent state
};

// Data that a page of a hybrid model has besides KV: part of the page's shard, so that a page is visible with
// all of it or not at all.
struct SidePool {
  std::string name;  // unique in the namespace
  HitRule rule = HitRule::all_pages;
  std::uint32_t layers = 0;       // tensors of the pool
  std::uint64_t piece_bytes = 0;  // of one tensor's part of a page, or of one state; a multiple of 8

  friend bool operator==(const SidePool&, const SidePool&) = default;
};

// Every field enters the digest. Strings may be empty; at most kMaxIngredientBytes each.
struct NamespaceSpec {
  static constexpr std::size_t kMaxIngredientBytes = 512;
  static constexpr std::size_t kMaxSidePools = 8;

  std::string model;
  std::string revision;
  std::string dtype;                         // element type of the KV data, such as "bfloat16" or "fp8_e4m3"
  std::string quantization;                  // of the KV data, "" = none
  std::string kv_scales;                     // digest or name of the scale set, "" = none
  std::string rope;                          // RoPE settings in the engine's canonical text
  std::string overrides;                     // other config overrides that change KV data
  std::string draft_model;                   // "" = no draft KV in the page
  std::string layout = "page_first_direct";  // byte order inside a page
  std::optional<std::string> lora_id;        // absent and empty differ
  std::optional<std::string> cache_salt;     // absent and empty differ
  Attention attention = Attention::mha;
  std::uint64_t weights_epoch = 0;    // grows when weights are updated in place
  std::uint32_t page_tokens = 0;      // tokens of a page
  std::uint32_t first_layer = 0;      // of this pipeline stage
  std::uint32_t layers = 0;           // of this pipeline stage
  std::uint32_t heads_per_shard = 0;  // KV heads (MHA), 1 for MLA
  std::uint32_t head_dim = 0;         // elements of a head; latent plus rope for MLA
  std::uint32_t element_bytes = 0;
  std::uint32_t tp_size = 1;
  std::uint32_t format_version = 1;
  std::vector<SidePool> side_pools;  // of a hybrid model, in the order in which they lie in a shard

  // Bytes of one tensor's part of a page: one layer, K or V (MHA) or the latent (MLA).
  [[nodiscard]] std::uint64_t piece_bytes() const {
    return std::uint64_t{page_tokens} * heads_per_shard * head_dim * element_bytes;
  }
  // Tensors per layer: K and V, or the latent.
  [[nodiscard]] std::uint32_t kinds() const { return attention == Attention::mha ? 2 : 1; }
  // The KV data of one shard of one page.
  [[nodiscard]] std::uint64_t kv_bytes() const { return piece_bytes() * kinds() * layers; }
  // Where a side pool begins in a shard; for side_pools.size() the shard's end.
  [[nodiscard]] std::uint64_t side_pool_offset(std::size_t pool) const {
    std::uint64_t offset = kv_bytes();
    for (std::size_t i = 0; i < pool; ++i) offset += side_pools[i].layers * side_pools[i].piece_bytes;
    return offset;
  }
  // Payload of one shard of one page: KV, then the side pools.
  [[nodiscard]] std::uint64_t shard_bytes() const { return side_pool_offset(side_pools.size()); }
  // Tensors of a rank: one per layer and kind, and those of the side pools.
  [[nodiscard]] std::size_t tensors() const;
  // Whether pages may carry states, and a hit must end with one.
  [[nodiscard]] bool has_states() const;
  // Shards of a logical page: each rank's own for MHA, one for all ranks for MLA.
  [[nodiscard]] std::uint32_t shards() const { return attention == Attention::mha ? tp_size : 1; }
  // Bytes from shard to shard in the pool.
  [[nodiscard]] std::uint64_t shard_stride() const { return align_up(shard_bytes(), kPoolAlignment); }
  [[nodiscard]] std::uint64_t slot_bytes() const { return shard_stride() * shards(); }

  // invalid_argument with the field's name when a number is zero or out of range.
  [[nodiscard]] Outcome validate() const;
  // Digest of every ingredient, the weights epoch included.
  [[nodiscard]] PrefixHash digest() const;
  // Digest of every ingredient but the weights epoch: what `namespace bump` addresses.
  [[nodiscard]] PrefixHash base_digest() const;
  // Prior of page 0 in the hash chain, from lora_id and cache_salt.
  [[nodiscard]] std::optional<PrefixHash> seed() const;

  // Canonical bytes: the wire form and the digest's preimage.
  void encode(WireWriter& out) const;
  static NamespaceSpec decode(WireReader& in);

  friend bool operator==(const NamespaceSpec&, const NamespaceSpec&) = default;
};

}  // namespace hicache
