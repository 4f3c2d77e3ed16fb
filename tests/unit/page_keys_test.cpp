// AC-14 to AC-17: under which names SGLang's storage back ends keep a page.
#include "shm/page_keys.hpp"

#include "shm/prefix_hash.hpp"
#include "tests/support/catch.hpp"

namespace hicache::daemon {
namespace {

// Page 0 of AC-01: tokens 1 to 4.
const std::vector<std::uint32_t> kTokens = {1, 2, 3, 4};
const PrefixHash kPage = hash_page(kTokens, std::nullopt);
const std::string kHex = "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72";

KeyOwner owner(const std::string& model, Attention attention, std::uint32_t rank, std::uint32_t size) {
  KeyOwner o;
  o.model = model;
  o.attention = attention;
  o.tp_rank = rank;
  o.tp_size = size;
  return o;
}
using Names = std::vector<std::string>;

}  // namespace

TEST_CASE("AC-14 file key, MHA") {
  CHECK(file_key(kPage, owner("meta-llama/Llama-3.1-8B-Instruct", Attention::mha, 1, 2)) ==
        kHex + "_meta-llama-Llama-3.1-8B-Instruct_1_2.bin");
  KeyOwner staged = owner("m", Attention::mha, 1, 2);
  staged.pp_size = 4;
  staged.pp_rank = 3;
  CHECK(file_key(kPage, staged) == kHex + "_m_1_2_4_3.bin");
  staged.cp_size = 2;
  staged.cp_rank = 1;
  CHECK(file_key(kPage, staged) == kHex + "_m_1_2_4_3_cp1_2.bin");
  CHECK(file_key(kPage, owner("", Attention::mha, 0, 1)) == kHex + "__0_1.bin");
}

TEST_CASE("AC-15 file key, MLA") {
  for (std::uint32_t rank = 0; rank < 8; ++rank) {
    CHECK(file_key(kPage, owner("deepseek-ai/DeepSeek-V3", Attention::mla, rank, 8)) ==
          kHex + "_deepseek-ai-DeepSeek-V3.bin");
  }
}

TEST_CASE("AC-16 mooncake keys") {
  const KeyOwner mha = owner("org/model", Attention::mha, 1, 2);
  const KeyOwner mla = owner("org/model", Attention::mla, 1, 2);
  CHECK(mooncake_keys(kPage, mha, MooncakeNames::v0_5_3) == Names{kHex + "_1_k", kHex + "_1_v"});
  CHECK(mooncake_keys(kPage, mla, MooncakeNames::v0_5_3) == Names{kHex + "_k"});
  CHECK(mooncake_keys(kPage, mla, MooncakeNames::newest) == Names{kHex + "__k"});
  CHECK(mooncake_keys(kPage, mha, MooncakeNames::newest) == Names{kHex + "_1_k", kHex + "_1_v"});
  CHECK(mooncake_keys(kPage, mha, MooncakeNames::newest, "tag").front() == "tag_org/model_" + kHex + "_1_k");
}

TEST_CASE("AC-17 hf3fs keys") {
  CHECK(hf3fs_keys(kPage, Attention::mha, PageLayout::page_first) == Names{kHex + "-k", kHex + "-v"});
  CHECK(hf3fs_keys(kPage, Attention::mha, PageLayout::layer_first) == Names{kHex});
  CHECK(hf3fs_keys(kPage, Attention::mla, PageLayout::page_first) == Names{kHex});
  CHECK(whole_pages(5, 2) == 2);  // k0, v0, k1, v1, k2
  CHECK(whole_pages(6, 2) == 3);
  CHECK(whole_pages(3, 1) == 3);
  CHECK(whole_pages(0, 2) == 0);
}

}  // namespace hicache::daemon
