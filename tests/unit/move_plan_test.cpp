// The launches with which a rank in io_backend kernel moves pages on a GPU: each row of each piece of each
// page once, layers in order, never more blocks than the quota. AC-33 gives the shape of one launch.
#include "libhicache/src/kernel/move_plan.hpp"

#include <vector>

#include "tests/support/catch.hpp"
#include "tests/support/test_rank.hpp"

namespace hicache {
namespace {

NamespaceSpec hybrid_spec() {
  NamespaceSpec spec = test::small_spec(Attention::mha, 1);
  spec.layers = 5;
  spec.side_pools = {{"indexer", HitRule::all_pages, 5, 24}, {"state", HitRule::trailing_pages, 3, 128}};
  return spec;
}

}  // namespace

TEST_CASE(
    "AC-33 launches of io_backend kernel cover every row once, in the order of the layers, within the "
    "quota") {
  NamespaceSpec spec =
      GENERATE(test::small_spec(Attention::mha, 1), test::small_spec(Attention::mla, 1), hybrid_spec());
  const auto geometry = test::device_geometry(spec, 64);
  const auto tensors = plan_tensors(spec, geometry);
  REQUIRE(tensors.ok());
  REQUIRE(tensors->size() == geometry.tensors.size());
  for (const bool by_layer : {false, true}) {
    for (const std::uint32_t quota : {1u, 2u, 8u}) {
      for (const std::uint32_t pages : {1u, 7u, 64u, 4096u, 65536u}) {
        const auto launches = plan_launches(*tensors, pages, spec.layers, quota, by_layer);
        std::uint32_t next = 0;
        std::uint32_t done = 0;
        for (const PlannedLaunch& launch : launches) {
          INFO("first " << launch.first << " count " << launch.count << " pages " << pages);
          REQUIRE(launch.first == next);
          next += launch.count;
          REQUIRE(next <= tensors->size());
          const PlannedTensor& one = (*tensors)[launch.first];
          for (std::uint32_t i = launch.first; i < next; ++i) {
            const PlannedTensor& tensor = (*tensors)[i];
            REQUIRE(tensor.rows == one.rows);
            REQUIRE(tensor.row_bytes == one.row_bytes);
            REQUIRE(tensor.states == one.states);
            if (by_layer) REQUIRE(tensor.layer == one.layer);
          }
          REQUIRE(launch.items == launch.count * pages * one.rows);
          REQUIRE(launch.blocks >= 1);
          REQUIRE(launch.blocks <= quota);
          // The last warp's share begins inside, and the warps reach the end.
          REQUIRE(std::uint64_t{launch.blocks} * kMoveWarps * launch.items_per_warp >= launch.items);
          REQUIRE(std::uint64_t{launch.blocks - 1} * kMoveWarps * launch.items_per_warp < launch.items);
          REQUIRE(launch.layers_done >= done);
          done = launch.layers_done;
          if (next < tensors->size()) REQUIRE((*tensors)[next].layer == done);
        }
        REQUIRE(next == tensors->size());
        REQUIRE(done == spec.layers);
      }
    }
  }
}

TEST_CASE("rows are tokens where a piece can be told apart, and pieces of odd words are refused") {
  NamespaceSpec spec = test::small_spec(Attention::mha, 1);
  auto geometry = test::device_geometry(spec, 8);
  const auto tensors = plan_tensors(spec, geometry);
  REQUIRE(tensors.ok());
  CHECK((*tensors)[0].rows == spec.page_tokens);
  CHECK((*tensors)[0].row_bytes * spec.page_tokens == spec.piece_bytes());
  spec.head_dim = 1;  // 2 bytes a token, 8 bytes a page
  const auto whole = plan_tensors(spec, test::device_geometry(spec, 8));
  REQUIRE(whole.ok());
  CHECK((*whole)[0].rows == 1);
  CHECK((*whole)[0].row_bytes == 8);
  geometry.tensors[1].offset += 4;
  const auto refused = plan_tensors(spec, geometry);
  REQUIRE(refused.status() == Status::invalid_argument);
  CHECK(refused.error().message.find("tensor 1") != std::string::npos);
}

}  // namespace hicache
