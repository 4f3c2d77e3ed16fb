#include "shm/namespace_spec.hpp"

#include <algorithm>
#include <string_view>

#include "shm/prefix_hash.hpp"
#include "shm/protocol.hpp"
#include "shm/region_layout.hpp"

namespace hicache {
namespace {

constexpr std::uint32_t kMaxPageTokens = 65536;
constexpr std::uint32_t kMaxHeads = 65536;
constexpr std::uint32_t kMaxHeadDim = 1u << 20;
constexpr std::uint32_t kMaxElementBytes = 16;
constexpr std::uint32_t kMaxFirstLayer = 65535;
// A slot never crosses a 1 GiB line of the pool, so it can't be larger than that.
constexpr std::uint64_t kMaxSlotBytes = kGiB;

constexpr std::size_t kMaxSidePoolName = 64;
constexpr std::uint64_t kSidePieceUnit = 8;  // pages are copied in words
constexpr std::size_t kSidePoolWireBytes = 4 + 4 + 4 + 8;

constexpr std::string_view kDigestDomain = "hicache-namespace-v1";
constexpr std::string_view kBaseDigestDomain = "hicache-namespace-base-v1";

Outcome refuse(std::string_view field, std::uint64_t value, std::uint64_t low, std::uint64_t high) {
  return Error{Status::invalid_argument,
               "namespace field " + std::string(field) + " is " + std::to_string(value) + ", expected " +
                   std::to_string(low) + " to " + std::to_string(high),
               0};
}

PrefixHash digest_of(std::string_view domain, const NamespaceSpec& spec) {
  WireWriter out;
  out.text(domain);
  spec.encode(out);
  return sha256(out.bytes());
}

void encode_optional(WireWriter& out, const std::optional<std::string>& value) {
  out.integer(static_cast<std::uint8_t>(value.has_value() ? 1 : 0));
  if (value) out.text(*value);
}

Outcome refuse_pool(const SidePool& pool, std::string_view field, const std::string& value,
                    const std::string& expected) {
  return Error{Status::invalid_argument,
               "namespace field side_pools: pool '" + pool.name + "': " + std::string(field) + " is " +
                   value + ", expected " + expected,
               0};
}

Outcome validate_side_pools(const std::vector<SidePool>& pools) {
  if (pools.size() > NamespaceSpec::kMaxSidePools) {
    return refuse("side_pools", pools.size(), 0, NamespaceSpec::kMaxSidePools);
  }
  for (std::size_t i = 0; i < pools.size(); ++i) {
    const SidePool& pool = pools[i];
    if (pool.name.empty() || pool.name.size() > kMaxSidePoolName) {
      return refuse_pool(pool, "name", std::to_string(pool.name.size()) + " bytes long",
                         "1 to " + std::to_string(kMaxSidePoolName));
    }
    for (std::size_t other = 0; other < i; ++other) {
      if (pools[other].name == pool.name) return refuse_pool(pool, "name", "there twice", "a name each");
    }
    if (pool.rule != HitRule::all_pages && pool.rule != HitRule::trailing_pages) {
      return refuse_pool(pool, "rule", std::to_string(static_cast<std::uint32_t>(pool.rule)),
                         "1 (all_pages) or 2 (trailing_pages)");
    }
    if (pool.layers == 0 || pool.layers > kMaxLayers) {
      return refuse_pool(pool, "layers", std::to_string(pool.layers), "1 to " + std::to_string(kMaxLayers));
    }
    if (pool.piece_bytes == 0 || pool.piece_bytes % kSidePieceUnit != 0 ||
        pool.piece_bytes > kMaxShardBytes / pool.layers) {
      return refuse_pool(pool, "piece_bytes", std::to_string(pool.piece_bytes),
                         "a multiple of " + std::to_string(kSidePieceUnit) + " of at most " +
                             std::to_string(kMaxShardBytes / pool.layers));
    }
  }
  return success();
}

void encode_side_pools(WireWriter& out, const std::vector<SidePool>& pools) {
  out.integer(static_cast<std::uint32_t>(pools.size()));
  for (const SidePool& pool : pools) {
    out.text(pool.name);
    out.integer(static_cast<std::uint32_t>(pool.rule));
    out.integer(pool.layers);
    out.integer(pool.piece_bytes);
  }
}

std::optional<std::string> decode_optional(WireReader& in) {
  const auto present = in.integer<std::uint8_t>();
  if (present > 1) in.fail();
  if (present == 0) return std::nullopt;
  return in.text(NamespaceSpec::kMaxIngredientBytes);
}

}  // namespace

Outcome NamespaceSpec::validate() const {
  const std::pair<std::string_view, const std::string*> texts[] = {
      {"model", &model},
      {"revision", &revision},
      {"dtype", &dtype},
      {"quantization", &quantization},
      {"kv_scales", &kv_scales},
      {"rope", &rope},
      {"overrides", &overrides},
      {"draft_model", &draft_model},
      {"layout", &layout},
      {"lora_id", lora_id ? &*lora_id : nullptr},
      {"cache_salt", cache_salt ? &*cache_salt : nullptr},
  };
  for (const auto& [name, text] : texts) {
    if (text != nullptr && text->size() > kMaxIngredientBytes) {
      return Error{Status::invalid_argument,
                   "namespace field " + std::string(name) + " has " + std::to_string(text->size()) +
                       " bytes, expected at most " + std::to_string(kMaxIngredientBytes),
                   0};
    }
  }
  if (attention != Attention::mha && attention != Attention::mla) {
    return Error{Status::invalid_argument,
                 "namespace field attention is " + std::to_string(static_cast<std::uint32_t>(attention)) +
                     ", expected 1 (mha) or 2 (mla)",
                 0};
  }
  struct Range {
    std::string_view name;
    std::uint32_t value, low, high;
  };
  const Range ranges[] = {
      {"page_tokens", page_tokens, 1, kMaxPageTokens},
      {"first_layer", first_layer, 0, kMaxFirstLayer},
      {"layers", layers, 1, kMaxLayers},
      {"heads_per_shard", heads_per_shard, 1, attention == Attention::mla ? 1 : kMaxHeads},
      {"head_dim", head_dim, 1, kMaxHeadDim},
      {"element_bytes", element_bytes, 1, kMaxElementBytes},
      {"tp_size", tp_size, 1, kMaxTpSize},
      {"format_version", format_version, 1, 0xffffffffu},
  };
  for (const Range& r : ranges) {
    if (r.value < r.low || r.value > r.high) return refuse(r.name, r.value, r.low, r.high);
  }
  if (const auto valid = validate_side_pools(side_pools); !valid) return valid;
  // The bounds above allow up to 2^65.
  std::uint64_t piece = std::uint64_t{page_tokens} * heads_per_shard;
  std::uint64_t shard = 0;
  bool overflow = __builtin_mul_overflow(piece, std::uint64_t{head_dim} * element_bytes, &piece) ||
                  __builtin_mul_overflow(piece, std::uint64_t{layers} * kinds(), &shard);
  for (const SidePool& pool : side_pools) {  // each is bounded by kMaxShardBytes already
    overflow = overflow || __builtin_add_overflow(shard, pool.layers * pool.piece_bytes, &shard);
  }
  if (overflow || shard > kMaxShardBytes) {
    return Error{Status::invalid_argument,
                 "namespace fields page_tokens x heads_per_shard x head_dim x element_bytes x layers, and "
                 "side_pools, give a shard of " +
                     (overflow ? std::string("more than 2^64") : std::to_string(shard)) +
                     " bytes, expected at most " + std::to_string(kMaxShardBytes),
                 0};
  }
  if (slot_bytes() > kMaxSlotBytes) {
    return Error{Status::invalid_argument,
                 "namespace field tp_size " + std::to_string(tp_size) + " gives a page of " +
                     std::to_string(slot_bytes()) + " bytes over all shards, expected at most " +
                     std::to_string(kMaxSlotBytes),
                 0};
  }
  return success();
}

std::size_t NamespaceSpec::tensors() const {
  std::size_t count = std::size_t{layers} * kinds();
  for (const SidePool& pool : side_pools) count += pool.layers;
  return count;
}

bool NamespaceSpec::has_states() const {
  return std::any_of(side_pools.begin(), side_pools.end(),
                     [](const SidePool& pool) { return pool.rule == HitRule::trailing_pages; });
}

PrefixHash NamespaceSpec::digest() const {
  return digest_of(kDigestDomain, *this);
}

PrefixHash NamespaceSpec::base_digest() const {
  NamespaceSpec base = *this;
  base.weights_epoch = 0;
  return digest_of(kBaseDigestDomain, base);
}

std::optional<PrefixHash> NamespaceSpec::seed() const {
  return namespace_seed(lora_id, cache_salt);
}

void NamespaceSpec::encode(WireWriter& out) const {
  out.text(model);
  out.text(revision);
  out.text(dtype);
  out.text(quantization);
  out.text(kv_scales);
  out.text(rope);
  out.text(overrides);
  out.text(draft_model);
  out.text(layout);
  encode_optional(out, lora_id);
  encode_optional(out, cache_salt);
  out.integer(static_cast<std::uint32_t>(attention));
  out.integer(weights_epoch);
  out.integer(page_tokens);
  out.integer(first_layer);
  out.integer(layers);
  out.integer(heads_per_shard);
  out.integer(head_dim);
  out.integer(element_bytes);
  out.integer(tp_size);
  out.integer(format_version);
  encode_side_pools(out, side_pools);
}

NamespaceSpec NamespaceSpec::decode(WireReader& in) {
  NamespaceSpec spec;
  spec.model = in.text(kMaxIngredientBytes);
  spec.revision = in.text(kMaxIngredientBytes);
  spec.dtype = in.text(kMaxIngredientBytes);
  spec.quantization = in.text(kMaxIngredientBytes);
  spec.kv_scales = in.text(kMaxIngredientBytes);
  spec.rope = in.text(kMaxIngredientBytes);
  spec.overrides = in.text(kMaxIngredientBytes);
  spec.draft_model = in.text(kMaxIngredientBytes);
  spec.layout = in.text(kMaxIngredientBytes);
  spec.lora_id = decode_optional(in);
  spec.cache_salt = decode_optional(in);
  const auto attention = in.integer<std::uint32_t>();
  spec.attention = static_cast<Attention>(attention);
  if (spec.attention != Attention::mha && spec.attention != Attention::mla) in.fail();
  spec.weights_epoch = in.integer<std::uint64_t>();
  spec.page_tokens = in.integer<std::uint32_t>();
  spec.first_layer = in.integer<std::uint32_t>();
  spec.layers = in.integer<std::uint32_t>();
  spec.heads_per_shard = in.integer<std::uint32_t>();
  spec.head_dim = in.integer<std::uint32_t>();
  spec.element_bytes = in.integer<std::uint32_t>();
  spec.tp_size = in.integer<std::uint32_t>();
  spec.format_version = in.integer<std::uint32_t>();
  spec.side_pools.resize(in.count(kMaxSidePools, kSidePoolWireBytes));
  for (SidePool& pool : spec.side_pools) {
    pool.name = in.text(kMaxSidePoolName);
    pool.rule = static_cast<HitRule>(in.integer<std::uint32_t>());
    if (pool.rule != HitRule::all_pages && pool.rule != HitRule::trailing_pages) in.fail();
    pool.layers = in.integer<std::uint32_t>();
    pool.piece_bytes = in.integer<std::uint64_t>();
  }
  return spec;
}

}  // namespace hicache
