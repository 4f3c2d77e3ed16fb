// Who shares pages with whom: namespaces, their ingredients, bumps of the weights epoch, and one pool for all
// sizes.
#include <nlohmann/json.hpp>

#include "tests/support/catch.hpp"
#include "tests/support/test_rank.hpp"

namespace hicache::test {
namespace {

// Writes a prompt as `writer` and tells how much of it an engine with `reader`'s spec finds.
std::uint32_t found_by(const NamespaceSpec& writer_spec, const NamespaceSpec& reader_spec) {
  const TestDaemon daemon;
  TestRank writer(daemon, "writer", 0, writer_spec);
  const auto hashes = prompt(1, 3);
  REQUIRE(write_prompt(writer, 1, hashes) == 3);
  REQUIRE(writer.session().probe(hashes).leading == 3);
  TestRank reader(daemon, "reader", 0, reader_spec);
  const std::uint32_t probed = reader.session().probe(hashes).leading;
  const auto reserved = reader.run(reader.session().reserve(1, hashes));
  REQUIRE(reserved.status == Status::ok);
  REQUIRE(reserved.hits == probed);
  return probed;
}

}  // namespace

TEST_CASE("two engines of one namespace share pages") {
  const NamespaceSpec spec = small_spec(Attention::mha, 1);
  CHECK(found_by(spec, spec) == 3);
}

TEST_CASE("two engines with any difference in the namespace's ingredients never share pages") {
  struct Difference {
    const char* ingredient;
    void (*apply)(NamespaceSpec&);
  };
  const auto difference =
      GENERATE(Difference{"model", [](NamespaceSpec& s) { s.model = "other-model"; }},
               Difference{"revision", [](NamespaceSpec& s) { s.revision = "r2"; }},
               Difference{"dtype", [](NamespaceSpec& s) { s.dtype = "float16"; }},
               Difference{"quantization", [](NamespaceSpec& s) { s.quantization = "fp8"; }},
               Difference{"kv_scales", [](NamespaceSpec& s) { s.kv_scales = "scales-2"; }},
               Difference{"rope", [](NamespaceSpec& s) { s.rope = "yarn:4"; }},
               Difference{"overrides", [](NamespaceSpec& s) { s.overrides = "window=4096"; }},
               Difference{"draft_model", [](NamespaceSpec& s) { s.draft_model = "eagle"; }},
               Difference{"layout", [](NamespaceSpec& s) { s.layout = "page_first"; }},
               Difference{"lora_id", [](NamespaceSpec& s) { s.lora_id = "lora-a"; }},
               Difference{"lora_id, empty instead of absent", [](NamespaceSpec& s) { s.lora_id = ""; }},
               Difference{"cache_salt", [](NamespaceSpec& s) { s.cache_salt = "tenant-1"; }},
               Difference{"attention", [](NamespaceSpec& s) { s.attention = Attention::mla; }},
               Difference{"weights_epoch", [](NamespaceSpec& s) { s.weights_epoch = 1; }},
               Difference{"page_tokens", [](NamespaceSpec& s) { s.page_tokens = 8; }},
               Difference{"first_layer", [](NamespaceSpec& s) { s.first_layer = 2; }},
               Difference{"layers", [](NamespaceSpec& s) { s.layers = 3; }},
               Difference{"heads_per_shard", [](NamespaceSpec& s) { s.heads_per_shard = 2; }},
               Difference{"head_dim", [](NamespaceSpec& s) { s.head_dim = 32; }},
               Difference{"element_bytes", [](NamespaceSpec& s) { s.element_bytes = 1; }},
               Difference{"format_version", [](NamespaceSpec& s) { s.format_version = 2; }});
  INFO(difference.ingredient);
  const NamespaceSpec spec = small_spec(Attention::mha, 1);
  NamespaceSpec other = spec;
  difference.apply(other);
  CHECK(found_by(spec, other) == 0);
}

TEST_CASE("engines with another TP size never share pages") {
  const TestDaemon daemon;
  TestRank single(daemon, "single", 0, small_spec(Attention::mha, 1));
  const auto hashes = prompt(2, 2);
  REQUIRE(write_prompt(single, 1, hashes) == 2);
  TestRank rank0(daemon, "pair", 0, small_spec(Attention::mha, 2));
  TestRank rank1(daemon, "pair", 1, small_spec(Attention::mha, 2));
  CHECK(rank0.session().probe(hashes).leading == 0);
  CHECK(rank1.session().probe(hashes).leading == 0);
}

TEST_CASE("a bump of the weights epoch makes old pages unreachable and attached engines follow it") {
  const TestDaemon daemon;
  const NamespaceSpec spec = small_spec(Attention::mha, 1);
  TestRank rank(daemon, "engine", 0, spec);
  const auto hashes = prompt(3, 3);
  REQUIRE(write_prompt(rank, 1, hashes) == 3);
  const auto held =
      rank.run(rank.session().reserve(2, hashes));  // a request that is under way during the bump
  REQUIRE(held.hits == 3);
  const std::string base = to_hex(spec.base_digest());
  REQUIRE(control(daemon.socket_path(), {"namespace", "bump", base.substr(0, 16)}).ok());
  CHECK(rank.session().probe(hashes).leading == 0);
  CHECK(rank.run(rank.session().load(held.lease, 0, TestRank::pages(8, 3))).status == Status::ok);
  rank.run(rank.session().release(held.lease));
  const auto after = rank.run(rank.session().reserve(3, hashes));
  CHECK(after.hits == 0);
  rank.run(rank.session().release(after.lease));
  CHECK(write_prompt(rank, 4, hashes) == 3);
  CHECK(rank.session().probe(hashes).leading == 3);
  // An engine that attaches now lands in the new epoch and shares the new pages.
  TestRank late(daemon, "late", 0, spec);
  CHECK(late.session().probe(hashes).leading == 3);
  const auto status = nlohmann::json::parse(*control(daemon.socket_path(), {"status"}));
  CHECK(status.at("pages").at("resident") == 3);  // the old ones are gone
  CHECK_FALSE(control(daemon.socket_path(), {"namespace", "bump", "00000000ffff"}).ok());
  CHECK_FALSE(control(daemon.socket_path(), {"namespace", "bump", "ab"}).ok());
  const auto check = run_program({program("hicache-dump"), daemon.name(), "--check"});
  INFO(check.out);
  CHECK(check.status.exited_with(0));
}

TEST_CASE("namespaces with different page bytes share one pool and take it over from each other") {
  const TestDaemon daemon(R"({"pool": {"bytes": 1048576, "segment_bytes": 65536, "max_pages": 256},
                              "eviction": {"high_watermark": 0, "low_watermark": 0}})");
  NamespaceSpec small = small_spec(Attention::mha, 1);
  NamespaceSpec large = small;
  large.model = "large";
  large.head_dim = 2048;  // 32 KiB pages
  TestRank a(daemon, "small", 0, small);
  TestRank b(daemon, "large", 0, large);
  for (std::uint32_t i = 0; i < 64; ++i)
    write_prompt(a, 1 + i, prompt(1000 + i, 4));  // 256 pages of 4 KiB: all of it
  for (std::uint32_t i = 0; i < 8; ++i) CHECK(write_prompt(b, 1 + i, prompt(2000 + i, 4)) == 4);
  CHECK(b.session().probe(prompt(2007, 4)).leading == 4);
  for (std::uint32_t i = 0; i < 32; ++i) CHECK(write_prompt(a, 100 + i, prompt(3000 + i, 4)) == 4);
  CHECK(a.session().probe(prompt(3031, 4)).leading == 4);
  const auto check = run_program({program("hicache-dump"), daemon.name(), "--check"});
  INFO(check.out);
  CHECK(check.status.exited_with(0));
}

TEST_CASE("a full namespace table never frees a namespace that an attached engine or an open lease uses") {
  const TestDaemon daemon(R"({"limits": {"namespaces": 3}})");
  const NamespaceSpec spec = small_spec(Attention::mha, 1);
  TestRank rank(daemon, "engine", 0, spec);
  const auto hashes = prompt(4, 2);
  const auto held = rank.run(rank.session().reserve(1, hashes));
  REQUIRE(held.status == Status::ok);
  const std::string base = to_hex(spec.base_digest()).substr(0, 16);
  REQUIRE(control(daemon.socket_path(), {"namespace", "bump", base}).ok());
  // One entry is retired but held by the lease, one is the successor without pages: only one is left for
  // others.
  NamespaceSpec other = spec;
  other.model = "other";
  TestRank second(daemon, "second", 0, other);
  other.model = "one-too-many";
  AttachOptions options;
  options.socket_path = daemon.socket_path();
  options.engine = "third";
  options.spec = other;
  CHECK(Session::attach(options).status() == Status::again);
  const auto check = run_program({program("hicache-dump"), daemon.name(), "--check"});
  INFO(check.out);
  CHECK(check.status.exited_with(0));
  rank.run(rank.session().release(held.lease));
  CHECK(write_prompt(rank, 2, hashes) == 2);
  // Once the lease has gone, the retired entry serves the newcomer.
  TestRank third(daemon, "third", 0, other);
  CHECK(write_prompt(third, 1, hashes) == 2);
  CHECK(rank.session().probe(hashes).leading == 2);
}

}  // namespace hicache::test
