// The namespace digest: every ingredient counts, and the wire form is canonical.
#include "shm/namespace_spec.hpp"

#include "shm/prefix_hash.hpp"
#include "shm/protocol.hpp"
#include "shm/region_layout.hpp"
#include "tests/support/catch.hpp"

namespace hicache {

namespace {

NamespaceSpec example() {
  NamespaceSpec s;
  s.model = "org/model";
  s.revision = "r1";
  s.dtype = "bfloat16";
  s.quantization = "none";
  s.kv_scales = "scales";
  s.rope = "theta=10000";
  s.overrides = "a=1";
  s.draft_model = "draft";
  s.lora_id = "lora";
  s.cache_salt = "salt";
  s.weights_epoch = 3;
  s.page_tokens = 64;
  s.first_layer = 0;
  s.layers = 32;
  s.heads_per_shard = 2;
  s.head_dim = 128;
  s.element_bytes = 2;
  s.tp_size = 4;
  return s;
}

NamespaceSpec mla_example() {
  NamespaceSpec s = example();
  s.attention = Attention::mla;
  s.heads_per_shard = 1;
  s.head_dim = 576;
  return s;
}

std::vector<std::uint8_t> encoded(const NamespaceSpec& s) {
  WireWriter out;
  s.encode(out);
  return out.take();
}

void check_refused(const NamespaceSpec& s, const std::string& field) {
  const Outcome outcome = s.validate();
  REQUIRE(outcome.status() == Status::invalid_argument);
  CAPTURE(outcome.error().message);
  CHECK(outcome.error().message.find(field) != std::string::npos);
}

}  // namespace

TEST_CASE("A difference in any ingredient changes the digest") {
  const NamespaceSpec base = example();
  NamespaceSpec other = base;
  SECTION("model") {
    other.model = "org/model2";
  }
  SECTION("revision") {
    other.revision = "r2";
  }
  SECTION("dtype") {
    other.dtype = "fp8_e4m3";
  }
  SECTION("quantization") {
    other.quantization = "int8";
  }
  SECTION("kv_scales") {
    other.kv_scales = "scales2";
  }
  SECTION("rope") {
    other.rope = "theta=500000";
  }
  SECTION("side_pools") {
    other.side_pools.push_back({"indexer", HitRule::all_pages, 4, 64});
  }
  SECTION("overrides") {
    other.overrides = "a=2";
  }
  SECTION("draft_model") {
    other.draft_model = "";
  }
  SECTION("layout") {
    other.layout = "page_first";
  }
  SECTION("lora_id") {
    other.lora_id = "lora2";
  }
  SECTION("lora_id empty") {
    other.lora_id = "";
  }
  SECTION("lora_id absent") {
    other.lora_id.reset();
  }
  SECTION("cache_salt") {
    other.cache_salt = "salt2";
  }
  SECTION("cache_salt empty") {
    other.cache_salt = "";
  }
  SECTION("cache_salt absent") {
    other.cache_salt.reset();
  }
  SECTION("attention") {
    other.attention = Attention::mla;
  }
  SECTION("weights_epoch") {
    other.weights_epoch = 4;
  }
  SECTION("page_tokens") {
    other.page_tokens = 32;
  }
  SECTION("first_layer") {
    other.first_layer = 32;
  }
  SECTION("layers") {
    other.layers = 31;
  }
  SECTION("heads_per_shard") {
    other.heads_per_shard = 4;
  }
  SECTION("head_dim") {
    other.head_dim = 64;
  }
  SECTION("element_bytes") {
    other.element_bytes = 1;
  }
  SECTION("tp_size") {
    other.tp_size = 2;
  }
  SECTION("format_version") {
    other.format_version = 2;
  }
  SECTION("bytes moved from one text to the next") {
    other.model = base.model + base.revision.substr(0, 1);
    other.revision = base.revision.substr(1);
  }
  SECTION("lora_id and cache_salt exchanged") {
    std::swap(other.lora_id, other.cache_salt);
  }
  CHECK(other != base);
  CHECK(other.digest() != base.digest());
  CHECK((other.base_digest() == base.base_digest()) == (other.weights_epoch != base.weights_epoch));
}

TEST_CASE("Absent and empty optional ingredients differ from each other") {
  NamespaceSpec absent = example(), empty = example();
  absent.lora_id.reset();
  empty.lora_id = "";
  CHECK(absent.digest() != empty.digest());
  absent = example(), empty = example();
  absent.cache_salt.reset();
  empty.cache_salt = "";
  CHECK(absent.digest() != empty.digest());
}

TEST_CASE("Equal ingredients give equal digests, and the two digests differ") {
  CHECK(example().digest() == example().digest());
  NamespaceSpec first = example();
  first.weights_epoch = 0;
  CHECK(first.digest() != first.base_digest());
}

TEST_CASE("The chain's seed comes from LoRA id and cache salt only") {
  NamespaceSpec s = example();
  CHECK(s.seed() == namespace_seed("lora", "salt"));
  s.model = "another";
  CHECK(s.seed() == namespace_seed("lora", "salt"));
  s.lora_id.reset();
  s.cache_salt.reset();
  CHECK_FALSE(s.seed().has_value());
}

TEST_CASE("A namespace survives encoding and decoding") {
  NamespaceSpec bare = example();
  bare.lora_id.reset();
  bare.cache_salt = "";
  NamespaceSpec binary = example();
  binary.rope = std::string("\0\xff\n", 3);
  for (const NamespaceSpec& s : {example(), mla_example(), bare, binary, NamespaceSpec{}}) {
    const auto bytes = encoded(s);
    WireReader in(bytes);
    CHECK(NamespaceSpec::decode(in) == s);
    CHECK(in.finished());
  }
}

TEST_CASE("Every truncation of an encoded namespace is refused") {
  const auto bytes = encoded(example());
  for (std::size_t n = 0; n < bytes.size(); ++n) {
    WireReader in(std::span<const std::uint8_t>{bytes}.first(n));
    static_cast<void>(NamespaceSpec::decode(in));
    REQUIRE(in.failed());
  }
}

TEST_CASE("Over-long texts and unknown enum values are refused on the wire") {
  NamespaceSpec s = example();
  SECTION("text") {
    s.overrides = std::string(NamespaceSpec::kMaxIngredientBytes + 1, 'x');
  }
  SECTION("optional text") {
    s.cache_salt = std::string(NamespaceSpec::kMaxIngredientBytes + 1, 'x');
  }
  SECTION("attention 0") {
    s.attention = static_cast<Attention>(0);
  }
  SECTION("attention 3") {
    s.attention = static_cast<Attention>(3);
  }
  const auto bytes = encoded(s);
  WireReader in(bytes);
  static_cast<void>(NamespaceSpec::decode(in));
  CHECK(in.failed());
}

TEST_CASE("Numbers out of their range are refused by name") {
  NamespaceSpec s = example();
  REQUIRE(s.validate().ok());
  REQUIRE(mla_example().validate().ok());
  SECTION("page_tokens 0") {
    s.page_tokens = 0;
    check_refused(s, "page_tokens is 0");
  }
  SECTION("page_tokens") {
    s.page_tokens = 65537;
    check_refused(s, "page_tokens is 65537");
  }
  SECTION("first_layer") {
    s.first_layer = 0xffffffffu;
    check_refused(s, "first_layer");
  }
  SECTION("layers 0") {
    s.layers = 0;
    check_refused(s, "layers is 0");
  }
  SECTION("layers") {
    s.layers = kMaxLayers + 1;
    check_refused(s, "layers is " + std::to_string(kMaxLayers + 1));
  }
  SECTION("heads_per_shard") {
    s.heads_per_shard = 0;
    check_refused(s, "heads_per_shard is 0");
  }
  SECTION("heads_per_shard of MLA") {
    s = mla_example();
    s.heads_per_shard = 2;
    check_refused(s, "heads_per_shard is 2, expected 1 to 1");
  }
  SECTION("head_dim") {
    s.head_dim = 0;
    check_refused(s, "head_dim");
  }
  SECTION("element_bytes") {
    s.element_bytes = 0;
    check_refused(s, "element_bytes");
  }
  SECTION("tp_size 0") {
    s.tp_size = 0;
    check_refused(s, "tp_size is 0");
  }
  SECTION("tp_size") {
    s.tp_size = kMaxTpSize + 1;
    check_refused(s, "tp_size is " + std::to_string(kMaxTpSize + 1));
  }
  SECTION("format_version") {
    s.format_version = 0;
    check_refused(s, "format_version");
  }
  SECTION("attention") {
    s.attention = static_cast<Attention>(7);
    check_refused(s, "attention is 7");
  }
  SECTION("a shard that is too large") {
    s.head_dim = 65536;
    check_refused(s, "head_dim");
  }
  SECTION("a product past 64 bits") {
    s.page_tokens = s.heads_per_shard = 65536;
    s.head_dim = 1u << 20;
    s.element_bytes = 16;
    s.layers = 256;
    check_refused(s, "more than 2^64");
  }
  SECTION("a page over all shards past 1 GiB") {
    s.page_tokens = 2048;
    s.tp_size = kMaxTpSize;
    check_refused(s, "tp_size " + std::to_string(kMaxTpSize) + " gives a page of");
  }
  SECTION("a text that is too long") {
    s.draft_model = std::string(NamespaceSpec::kMaxIngredientBytes + 1, 'x');
    check_refused(s, "draft_model has 513 bytes");
  }
  SECTION("an optional text that is too long") {
    s.lora_id = std::string(NamespaceSpec::kMaxIngredientBytes + 1, 'x');
    check_refused(s, "lora_id has 513 bytes");
  }
}

TEST_CASE("Side pools survive the wire, are refused by name, and are part of a shard") {
  NamespaceSpec spec = example();
  const std::uint64_t kv = spec.shard_bytes();
  spec.side_pools = {{"indexer", HitRule::all_pages, 4, 64}, {"mamba", HitRule::trailing_pages, 2, 4096}};
  CHECK(spec.validate().ok());
  CHECK(spec.side_pool_offset(1) == kv + 4 * 64);
  CHECK(spec.shard_bytes() == kv + 4 * 64 + 2 * 4096);
  CHECK(spec.has_states());
  WireWriter out;
  spec.encode(out);
  WireReader in(out.bytes());
  CHECK(NamespaceSpec::decode(in) == spec);
  CHECK(in.finished());
  const auto refused = [&](auto&& spoil, const std::string& text) {
    NamespaceSpec bad = spec;
    spoil(bad);
    const auto outcome = bad.validate();
    REQUIRE(outcome.status() == Status::invalid_argument);
    CAPTURE(outcome.error().message);
    CHECK(outcome.error().message.find(text) != std::string::npos);
  };
  refused([](NamespaceSpec& s) { s.side_pools[1].name = "indexer"; }, "pool 'indexer': name is there twice");
  refused([](NamespaceSpec& s) { s.side_pools[0].name.clear(); }, "name is 0 bytes long, expected 1 to 64");
  refused([](NamespaceSpec& s) { s.side_pools[0].rule = static_cast<HitRule>(3); }, "rule is 3, expected 1");
  refused([](NamespaceSpec& s) { s.side_pools[0].layers = 0; }, "layers is 0, expected 1 to");
  refused([](NamespaceSpec& s) { s.side_pools[0].piece_bytes = 12; },
          "piece_bytes is 12, expected a multiple of 8");
  refused([](NamespaceSpec& s) { s.side_pools[0].piece_bytes = ~7ull; },
          "piece_bytes is 18446744073709551608");
  refused([](NamespaceSpec& s) { s.side_pools.resize(9, s.side_pools[0]); },
          "side_pools is 9, expected 0 to 8");
}

TEST_CASE("Sizes follow from the ingredients") {
  const NamespaceSpec mha = example();
  CHECK(mha.piece_bytes() == 64u * 2 * 128 * 2);
  CHECK(mha.shard_bytes() == mha.piece_bytes() * 2 * 32);
  CHECK(mha.shards() == 4);
  CHECK(mha.slot_bytes() == 4 * mha.shard_stride());
  const NamespaceSpec mla = mla_example();
  CHECK(mla.piece_bytes() == 64u * 576 * 2);
  CHECK(mla.shard_bytes() == mla.piece_bytes() * 32);
  CHECK(mla.shards() == 1);
  CHECK(mla.shard_stride() % kPoolAlignment == 0);
}

}  // namespace hicache
