// AC-01 to AC-13: the prefix hash chain and the seeds, byte for byte.
#include "shm/prefix_hash.hpp"

#include <numeric>
#include <thread>

#include "tests/support/catch.hpp"

namespace hicache {

namespace {

using Texts = std::vector<std::string>;

const std::string kPage0 = "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72";
const std::string kPage1 = "4ebfa8a1f3c341517621838c6e1b9aa350307e3f00b3cbd1a07ef740f54396d6";

// Tokens first ... last.
std::vector<std::uint32_t> tokens(std::uint32_t first, std::uint32_t last) {
  std::vector<std::uint32_t> out(last - first + 1);
  std::iota(out.begin(), out.end(), first);
  return out;
}

Texts hex(const std::vector<PrefixHash>& hashes) {
  Texts out;
  for (const PrefixHash& h : hashes) out.push_back(to_hex(h));
  return out;
}

std::string seed_hex(const std::optional<std::string>& key, const std::optional<std::string>& salt) {
  const auto seed = namespace_seed(key, salt);
  return seed ? to_hex(*seed) : "no seed";
}

}  // namespace

TEST_CASE("AC-01 hash chain, page 4") {
  CHECK(hex(hash_chain(tokens(1, 8), 4)) == Texts{kPage0, kPage1});
}

TEST_CASE("AC-02 hash chain, page 1") {
  CHECK(hex(hash_chain(tokens(1, 4), 1)) ==
        Texts{"67abdd721024f0ff4e0b3f4c2fc13bc5bad42d0b7851d456d88d203d15aaa450",
              "e95092c4b38d42d1363b9e9b06bc5d6377af1cd06651a9fedac8b36dc9e56114",
              "65a83b157c6cfe60e7f2b2dbc81912f32c87b62f180abb0b8b40bf4b5259ae86",
              "c6c57967c409c4a7922608584bb063c57e0785f766cb8dae3f2a77edb186150c"});
}

TEST_CASE("AC-03 hash chain, page 2") {
  CHECK(hex(hash_chain(tokens(1, 4), 2)) ==
        Texts{"34fb5c825de7ca4aea6e712f19d439c1da0c92c37b423936c5f618545ca4fa1f",
              "c57b445f90651b9a650e516ab2238c965b21af35608a31c303e6d9e407f2915c"});
}

TEST_CASE("AC-04 page size matters for the chain") {
  const Texts one = hex(hash_chain(tokens(1, 8), 8));
  CHECK(one == Texts{"8b4b2444e57aed8c2d05a1293255da1b048c63224317d4666230760935fa4a18"});
  CHECK(one[0] != kPage0);
  CHECK(one[0] != kPage1);
}

TEST_CASE("AC-05 a partial page is not hashed") {
  CHECK(hex(hash_chain(tokens(1, 10), 4)) == Texts{kPage0, kPage1});
  CHECK(hash_chain(tokens(1, 3), 4).empty());
  CHECK(hash_chain({}, 4).empty());
}

TEST_CASE("AC-06 an empty prior equals no prior") {
  const std::string expected = "f3e0813c89d0991f07fbb5027a68c0cb809e1effc0c1e8974664bd2e57b50024";
  CHECK(to_hex(hash_page(tokens(5, 8), std::nullopt)) == expected);
  CHECK(to_hex(hash_page(tokens(5, 8), from_hex(""))) == expected);
  CHECK(expected != kPage1);
  CHECK(to_hex(hash_page(tokens(5, 8), from_hex(kPage0))) == kPage1);
}

TEST_CASE("AC-07 bigram tokens hash like their flat list") {
  const std::vector<std::uint32_t> flat = {1, 2, 2, 3, 3, 4, 4, 5};
  CHECK(to_hex(hash_page(flat, std::nullopt)) ==
        "f721fe42aac11dcbfd1a17f24cc5765a0d5b6bc264d1c0b6581d775a7344c11f");
}

TEST_CASE("AC-08 tokens outside 32 bits are refused, not wrapped") {
  const std::vector<std::int64_t> widest = {0, 4294967295};
  const auto narrow = narrow_tokens(widest);
  REQUIRE(narrow.ok());
  CHECK(to_hex(hash_page(*narrow, std::nullopt)) ==
        "5981693c8df83eea16da42a0f748facb299546688544a0c2887ed5ffbf086e86");
  for (const std::int64_t bad : {std::int64_t{4294967296}, std::int64_t{-1}}) {
    const std::vector<std::int64_t> input = {7, bad};
    const auto refused = narrow_tokens(input);
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.status() == Status::invalid_argument);
    CHECK(refused.error().message.find("token 1 is " + std::to_string(bad)) != std::string::npos);
  }
}

TEST_CASE("AC-09 hash to signed 64") {
  CHECK(hash_to_int64(*from_hex(kPage0)) == -3488128144981237669);
  CHECK(hash_to_int64(*from_hex(kPage1)) == 5674439469042975057);
}

TEST_CASE("AC-10 namespace seed, LoRA only") {
  const auto seed = namespace_seed("lora-a", std::nullopt);
  REQUIRE(seed.has_value());
  CHECK(to_hex(*seed) == "407c773a7c02b33bd4a62af6bf5fc77997c2c8067811ecf2b39e3839c3f4284b");
  CHECK(hex(hash_chain(tokens(1, 8), 4, seed)) ==
        Texts{"e4f68dc4af99b6de199d5a048add282da40aa4ef97942ce9eca321bccada9376",
              "fbf38da27007309d9127971414d44f4bcf8e272e236565e65870e62aed63c6e4"});
}

TEST_CASE("AC-11 namespace fields do not commute") {
  CHECK(seed_hex(std::nullopt, "lora-a") ==
        "b0fd66943f0fa9d3dc3fe2090dcff7556488c6f019eb577a74a3f547f763b9d9");
  CHECK(seed_hex("a", "b") == "c8c5acd517d9109ddf84843ef6f4603af6c4fe55b093a70ed9de8e7ee5769282");
  CHECK(seed_hex("ab", std::nullopt) == "5903eb3107beaefcc6d245a871b79601926499c186de58723e22319e38c6a253");
}

TEST_CASE("AC-12 absent differs from empty") {
  CHECK(seed_hex(std::nullopt, std::nullopt) == "no seed");
  CHECK(hex(hash_chain(tokens(1, 8), 4, namespace_seed(std::nullopt, std::nullopt))) ==
        Texts{kPage0, kPage1});
  CHECK(seed_hex("", std::nullopt) == "fd649dd130277fa0773e23e84ddfa4ec779d9df77087968a60d7cefb9050ab1d");
  CHECK(seed_hex("", "") == "bea08aaebe976c9c4f8ebade6674ba3fe15783c47020e10c4721ad211aae36e4");
}

TEST_CASE("AC-13 KV-event salt seed") {
  CHECK(to_hex(kv_event_salt_seed("tenant-1")) ==
        "23c6b12a2de8357a660b45a142324dfc38bb06eeeaa011aeaa0f8a29de2deeea");
}

TEST_CASE("Hex text goes both ways and anything else is refused") {
  const auto hash = from_hex(kPage0);
  REQUIRE(hash.has_value());
  CHECK(to_hex(*hash) == kPage0);
  CHECK_FALSE(from_hex("").has_value());
  CHECK_FALSE(from_hex(kPage0.substr(1)).has_value());
  CHECK_FALSE(from_hex(kPage0 + "0").has_value());
  CHECK_FALSE(from_hex("CF" + kPage0.substr(2)).has_value());
  CHECK_FALSE(from_hex("g" + kPage0.substr(1)).has_value());
  CHECK_FALSE(from_hex(std::string(1, '\0') + kPage0.substr(1)).has_value());
}

TEST_CASE("SHA-256 of the empty text is the published value") {
  CHECK(to_hex(sha256({})) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}

TEST_CASE("Threads hash independently of each other") {
  const auto expected = hash_chain(tokens(1, 4096), 16);
  std::array<bool, 4> equal{};
  std::vector<std::thread> threads;
  threads.reserve(equal.size());
  for (bool& same : equal) {
    threads.emplace_back([&same, &expected] {
      same = true;
      for (int i = 0; i < 50; ++i) same = same && hash_chain(tokens(1, 4096), 16) == expected;
    });
  }
  for (std::thread& t : threads) t.join();
  for (const bool same : equal) CHECK(same);
}

}  // namespace hicache
