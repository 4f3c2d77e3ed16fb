// AC-18 to AC-21 and AC-26 to AC-31: sizes, offsets and extents of the seed system's host pools.
#include "shm/page_layout.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <set>

#include "shm/pool_sizing.hpp"
#include "shm/types.hpp"
#include "tests/support/catch.hpp"

namespace hicache {

namespace {

constexpr std::array kLayouts = {PageLayout::layer_first, PageLayout::page_first,
                                 PageLayout::page_first_direct, PageLayout::page_head};
constexpr MhaShape kMha{
    .layers = 3, .slots = 12, .heads = 4, .head_dim = 8, .page_tokens = 4, .item_bytes = 2};
constexpr MlaShape kMla{.layers = 3, .slots = 12, .channels = 9, .page_tokens = 4, .item_bytes = 2};
// The models of AC-18; slots is of no interest there.
constexpr MhaShape kLlama{
    .layers = 32, .slots = 64, .heads = 8, .head_dim = 128, .page_tokens = 64, .item_bytes = 2};
constexpr MlaShape kDeepSeek{.layers = 61, .slots = 64, .channels = 576, .page_tokens = 64, .item_bytes = 2};

using Extents = std::vector<PageExtent>;

// Extents from (K, V) pairs of one size.
Extents pairs(const std::vector<std::pair<std::uint64_t, std::uint64_t>>& kv, std::uint64_t bytes) {
  Extents out;
  for (const auto& [k, v] : kv) {
    out.push_back({k, bytes});
    out.push_back({v, bytes});
  }
  return out;
}

template <class Visit>
void for_each_coordinate(const MhaShape& s, Visit&& visit) {
  for (std::uint64_t kv = 0; kv < 2; ++kv)
    for (std::uint64_t l = 0; l < s.layers; ++l)
      for (std::uint64_t t = 0; t < s.slots; ++t)
        for (std::uint64_t h = 0; h < s.heads; ++h)
          for (std::uint64_t d = 0; d < s.head_dim; ++d) visit(kv, l, t, h, d);
}

}  // namespace

TEST_CASE("AC-18 bytes per token") {
  CHECK(kLlama.bytes_per_token() == 131072);
  CHECK(kDeepSeek.bytes_per_token() == 70272);
  CHECK(kLlama.bytes_per_token() * 64 == 8388608);
  CHECK(kLlama.half_bytes() == 4194304);
  CHECK(kLlama.total_bytes() == 8388608);
  CHECK(kDeepSeek.total_bytes() == 4497408);
}

TEST_CASE("AC-19 absolute size rounds down to whole pages") {
  const auto slots = slots_for_budget(30'000'000'000, kLlama.bytes_per_token(), 64);
  REQUIRE(slots.ok());
  CHECK(*slots == 228864);
  CHECK(*slots / 64 == 3576);
}

TEST_CASE("AC-20 an absolute size that is aligned already gets no extra page") {
  const auto slots = slots_for_budget(40'000'000'000, kDeepSeek.bytes_per_token(), 64);
  REQUIRE(slots.ok());
  CHECK(*slots == 569216);
  // One shared copy of what the round-up version would hold is one page more than this pool.
  CHECK((*slots + 64) * kDeepSeek.bytes_per_token() == 40004444160);
}

TEST_CASE("AC-21 ratio size rounds down to whole pages") {
  CHECK(slots_for_ratio(10000, 2.0, 64).value() == 19968);
  CHECK(slots_for_ratio(6400, 2.0, 64).value() == 12800);
}

TEST_CASE("Pool sizes from impossible parameters are refused") {
  CHECK(slots_for_budget(1000, 0, 64).status() == Status::invalid_argument);
  CHECK(slots_for_budget(1000, 10, 0).status() == Status::invalid_argument);
  CHECK(slots_for_ratio(1000, 0.0, 64).status() == Status::invalid_argument);
  CHECK(slots_for_ratio(1000, -1.0, 64).status() == Status::invalid_argument);
  CHECK(slots_for_ratio(1000, std::numeric_limits<double>::quiet_NaN(), 64).status() ==
        Status::invalid_argument);
  CHECK(slots_for_ratio(1000, std::numeric_limits<double>::infinity(), 64).status() ==
        Status::invalid_argument);
  CHECK(slots_for_ratio(~0ull, 2.0, 64).status() == Status::invalid_argument);
  CHECK(slots_for_ratio(1000, 2.0, 0).status() == Status::invalid_argument);
}

TEST_CASE("AC-26 layout offsets") {
  struct Row {
    std::uint64_t kv, layer, token, head, channel;
    std::array<std::uint64_t, 4> expected;
  };
  const Row rows[] = {{0, 2, 5, 3, 1, {1906, 1138, 1394, 1426}},
                      {1, 1, 10, 2, 7, {3758, 4334, 4270, 4350}},
                      {1, 2, 11, 3, 7, {4606, 4606, 4606, 4606}}};
  CHECK(kMha.total_bytes() == 4608);
  CHECK(kMha.half_bytes() == 2304);
  for (const Row& r : rows) {
    for (std::size_t i = 0; i < kLayouts.size(); ++i) {
      CAPTURE(i, r.kv, r.layer, r.token);
      CHECK(mha_offset(kMha, kLayouts[i], r.kv, r.layer, r.token, r.head, r.channel) == r.expected[i]);
    }
  }
}

TEST_CASE("AC-27 layouts are bijections") {
  for (const PageLayout layout : kLayouts) {
    CAPTURE(static_cast<std::uint32_t>(layout));
    std::set<std::uint64_t> offsets;
    std::map<std::pair<std::uint64_t, std::uint64_t>, std::set<std::uint64_t>>
        halves;  // (kv, page) -> offsets
    for_each_coordinate(kMha, [&](auto kv, auto l, auto t, auto h, auto d) {
      const std::uint64_t offset = mha_offset(kMha, layout, kv, l, t, h, d);
      offsets.insert(offset);
      halves[{kv, t / 4}].insert(offset);
    });
    CHECK(offsets.size() == 2304);
    CHECK(*offsets.begin() == 0);
    CHECK(*offsets.rbegin() == 4606);
    for (const std::uint64_t offset : offsets) REQUIRE(offset % 2 == 0);
    if (layout == PageLayout::layer_first) continue;
    CHECK(halves.size() == 6);
    for (const auto& [key, inside] : halves) {
      CHECK(inside.size() == 384);
      CHECK(*inside.rbegin() + 2 - *inside.begin() == 768);
    }
  }
}

TEST_CASE("AC-28 page pointers, page layouts") {
  const Extents expected = pairs({{0, 2304}, {768, 3072}, {1536, 3840}}, 768);
  for (const PageLayout layout :
       {PageLayout::page_first, PageLayout::page_first_direct, PageLayout::page_head}) {
    CHECK(mha_page_extents(kMha, layout, {0, 4, 8}).value() == expected);
  }
}

TEST_CASE("AC-29 page pointers, layer_first") {
  CHECK(mha_page_extents(kMha, PageLayout::layer_first, {4}).value() ==
        pairs({{256, 2560}, {1024, 3328}, {1792, 4096}}, 256));
}

TEST_CASE("AC-30 page_head split") {
  CHECK(mha_page_extents(kMha, PageLayout::page_head, {4}, 2).value() ==
        pairs({{768, 3072}, {1152, 3456}}, 384));
  CHECK(mha_page_extents(kMha, PageLayout::page_head, {4}, 4).value() ==
        pairs({{768, 3072}, {960, 3264}, {1152, 3456}, {1344, 3648}}, 192));
}

TEST_CASE("AC-31 MLA offsets") {
  CHECK(mla_offset(kMla, PageLayout::layer_first, 2, 5, 7).value() == 536);
  CHECK(mla_offset(kMla, PageLayout::page_first, 2, 5, 7).value() == 320);
  CHECK(mla_offset(kMla, PageLayout::page_first_direct, 2, 5, 7).value() == 392);
  CHECK(mla_page_extents(kMla, PageLayout::page_first_direct, {4}).value() == Extents{{216, 216}});
  CHECK(mla_page_extents(kMla, PageLayout::page_first, {4}).value() == Extents{{216, 216}});
  CHECK(kMla.total_bytes() == 648);
  MlaShape latent = kMla;
  latent.channels = 6;
  MlaShape rope = kMla;
  rope.channels = 3;
  CHECK(mla_kv_split_offset(latent, 2, 5, 4) == 260);
  CHECK(mla_kv_split_offset(rope, 2, 5, 2) == 130);
}

TEST_CASE("MLA layer_first has one extent per layer of a page") {
  CHECK(mla_page_extents(kMla, PageLayout::layer_first, {4}).value() ==
        Extents{{72, 72}, {288, 72}, {504, 72}});
}

TEST_CASE("page_head does not exist for MLA") {
  CHECK(mla_offset(kMla, PageLayout::page_head, 0, 0, 0).status() == Status::invalid_argument);
  CHECK(mla_page_extents(kMla, PageLayout::page_head, {0}).status() == Status::invalid_argument);
}

TEST_CASE("Extents of the whole pool cover every byte once, in every layout") {
  for (const PageLayout layout : kLayouts) {
    const auto extents = mha_page_extents(kMha, layout, {0, 4, 8}).value();
    std::vector<int> covered(kMha.total_bytes());
    for (const PageExtent& e : extents)
      for (std::uint64_t b = 0; b < e.bytes; ++b) ++covered.at(e.offset + b);
    CHECK(std::count(covered.begin(), covered.end(), 1) == static_cast<std::ptrdiff_t>(covered.size()));
  }
}

TEST_CASE("Extents of what is not a page, or of heads that don't split, are refused") {
  CHECK(mha_page_extents(kMha, PageLayout::page_first, {2}).status() == Status::invalid_argument);
  CHECK(mha_page_extents(kMha, PageLayout::page_first, {12}).status() == Status::invalid_argument);
  CHECK(mha_page_extents(kMha, PageLayout::page_head, {0}, 3).status() == Status::invalid_argument);
  CHECK(mha_page_extents(kMha, PageLayout::page_head, {0}, 0).status() == Status::invalid_argument);
  CHECK(mha_page_extents(kMha, PageLayout::page_first, {0}, 2).status() == Status::invalid_argument);
  CHECK(mla_page_extents(kMla, PageLayout::page_first, {5}).status() == Status::invalid_argument);
  MhaShape broken = kMha;
  broken.page_tokens = 0;
  CHECK(mha_page_extents(broken, PageLayout::page_first, {0}).status() == Status::invalid_argument);
}

}  // namespace hicache
