// hicache-ctl hash: a prompt's pages and their names, as a program and as a function.
#include <nlohmann/json.hpp>

#include "shm/prefix_hash.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/processes.hpp"
#include "tools/ctl/hash.hpp"

namespace hicache::ctl {
namespace {

using test::program;
using test::run_program;

const std::string kPage0 = "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72";
const std::string kPage1 = "4ebfa8a1f3c341517621838c6e1b9aa350307e3f00b3cbd1a07ef740f54396d6";

}  // namespace

TEST_CASE("hicache-ctl hash prints the pages of a prompt and AC-14 to AC-17's keys") {
  const auto mha =
      run_program({program("hicache-ctl"), "hash", "--page-size", "4", "--tokens", "1,2,3,4,5,6,7,8,9",
                   "--model", "meta-llama/Llama-3.1-8B-Instruct", "--rank", "1", "--tp-size", "2"});
  INFO(mha.out << mha.err);
  CHECK(mha.status.exited_with(0));
  CHECK(mha.out.find("page 0 " + kPage0) != std::string::npos);
  CHECK(mha.out.find("page 1 " + kPage1) != std::string::npos);
  CHECK(mha.out.find("page 2") == std::string::npos);  // not full
  for (const std::string key : {"_meta-llama-Llama-3.1-8B-Instruct_1_2.bin", "_1_k", "_1_v", "-k", "-v"}) {
    CHECK(mha.out.find(kPage0 + key + "\n") != std::string::npos);
    CHECK(mha.out.find(kPage1 + key + "\n") != std::string::npos);
  }
  const auto mla = run_program({program("hicache-ctl"), "hash", "--page-size", "4", "--tokens", "1,2,3,4",
                                "--model", "deepseek-ai/DeepSeek-V3", "--attention", "mla", "--rank", "5",
                                "--tp-size", "8", "--namespace", std::string(64, 'a'), "--json"});
  CHECK(mla.status.exited_with(0));
  const auto json = nlohmann::json::parse(mla.out);
  const auto& page = json["pages"].at(0);
  CHECK(page["hash"] == kPage0);
  CHECK(page["keys"]["file (sglang)"] == nlohmann::json::array({kPage0 + "_deepseek-ai-DeepSeek-V3.bin"}));
  CHECK(page["keys"]["mooncake 0.5.3"] == nlohmann::json::array({kPage0 + "_k"}));
  CHECK(page["keys"]["mooncake newest"] == nlohmann::json::array({kPage0 + "__k"}));
  CHECK(page["keys"]["hf3fs"] == nlohmann::json::array({kPage0}));
  CHECK(page["keys"]["redis"] == nlohmann::json::array({"hicache:" + std::string(64, 'a') + ":" + kPage0}));
}

TEST_CASE("hicache-ctl hash takes seeds and priors") {
  HashOptions options;
  options.page_tokens = 4;
  options.tokens = {5, 6, 7, 8};
  options.prior = kPage0;
  auto pages = page_names(options);
  REQUIRE(pages);
  CHECK(to_hex((*pages)[0].hash) == kPage1);
  options.prior.reset();
  options.lora_id = "adapter";
  options.cache_salt = "salt";
  pages = page_names(options);
  REQUIRE(pages);
  const std::vector<std::uint32_t> tokens = {5, 6, 7, 8};
  CHECK((*pages)[0].hash == hash_page(tokens, namespace_seed("adapter", "salt")));
}

TEST_CASE("hicache-ctl hash says what is wrong with its input") {
  HashOptions options;
  options.page_tokens = 1;
  options.tokens = {1, -5};
  CHECK(page_names(options).error().message == "token 1 is -5, expected 0 to 4294967295");
  options.tokens = {1};
  options.prior = "12ab";
  CHECK(page_names(options).error().message == "--prior is '12ab', expected 64 hex digits");
  const auto bad =
      run_program({program("hicache-ctl"), "hash", "--page-size", "4", "--tokens", "1", "--rank", "2"});
  CHECK(bad.status.exited_with(2));
  CHECK(bad.err.find("rank 2 of 1") != std::string::npos);
  CHECK(run_program({program("hicache-ctl"), "hash", "--tokens", "1"}).status.exited_with(2));
}

}  // namespace hicache::ctl
