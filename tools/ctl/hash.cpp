#include "tools/ctl/hash.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "shm/prefix_hash.hpp"
#include "tools/ctl/tables.hpp"

namespace hicache::ctl {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;

Result<std::optional<PrefixHash>> digest_of(const char* option, const std::optional<std::string>& text) {
  if (!text) return std::optional<PrefixHash>();
  const auto digest = from_hex(*text);
  if (digest) return digest;
  return Error{Status::invalid_argument,
               fmt::format("{} is '{}', expected 64 hex digits", option, printable(*text)), 0};
}

std::vector<NamedKey> keys_of(const PrefixHash& hash, const HashOptions& o,
                              const std::optional<PrefixHash>& ns) {
  std::vector<NamedKey> keys = {
      {"file (sglang)", {file_key(hash, o.owner)}},
      {"mooncake 0.5.3", mooncake_keys(hash, o.owner, MooncakeNames::v0_5_3)},
      {"mooncake newest", mooncake_keys(hash, o.owner, MooncakeNames::newest)},
      {"hf3fs", hf3fs_keys(hash, o.owner.attention, o.layout)},
      {"nixl", {nixl_key(hash, o.owner)}},
      {"eic", {eic_key(hash, o.owner, o.layout)}},
  };
  if (ns) {
    keys.push_back({"file (segment)", {to_hex(*ns) + ":" + to_hex(hash)}});
    keys.push_back({"redis", {o.redis_prefix + ":" + to_hex(*ns) + ":" + to_hex(hash)}});
  }
  return keys;
}

std::string hash_json(const std::vector<PageNames>& pages) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const PageNames& page : pages) {
    nlohmann::ordered_json keys = nlohmann::ordered_json::object();
    for (const NamedKey& k : page.keys) keys[k.backend] = k.keys;
    list.push_back({{"hash", to_hex(page.hash)}, {"keys", std::move(keys)}});
  }
  return nlohmann::ordered_json{{"pages", list}}.dump(2, ' ', true,
                                                      nlohmann::json::error_handler_t::replace) +
         "\n";
}

std::string hash_text(const std::vector<PageNames>& pages) {
  std::string text;
  for (std::size_t i = 0; i < pages.size(); ++i) {
    text += fmt::format("page {} {}\n", i, to_hex(pages[i].hash));
    for (const NamedKey& named : pages[i].keys) {
      for (const std::string& key : named.keys)
        text += fmt::format("  {:<16} {}\n", named.backend, printable(key));
    }
  }
  return text;
}

}  // namespace

Result<std::vector<PageNames>> page_names(const HashOptions& o) {
  if (o.page_tokens == 0)
    return Error{Status::invalid_argument, "a page has 0 tokens, expected 1 or more", 0};
  const auto tokens = narrow_tokens(o.tokens);
  if (!tokens) return tokens.error();
  const auto prior = digest_of("--prior", o.prior);
  if (!prior) return prior.error();
  const auto ns = digest_of("--namespace", o.ns_digest);
  if (!ns) return ns.error();
  const auto seed = *prior ? *prior : namespace_seed(o.lora_id, o.cache_salt);
  std::vector<PageNames> pages;
  for (const PrefixHash& hash : hash_chain(*tokens, o.page_tokens, seed)) {
    pages.push_back({hash, keys_of(hash, o, *ns)});
  }
  return pages;
}

int run_hash(int argc, char** argv) {
  HashOptions options;
  bool json = false;
  CLI::App app{"hicache-ctl hash: the hashes of a prompt's pages, and their names in storage backends"};
  app.add_option("--page-size", options.page_tokens, "tokens of a page")
      ->required()
      ->check(CLI::Range(1u, 65536u));
  app.add_option("--tokens", options.tokens, "the prompt: 1,2,3,...")->required()->delimiter(',');
  app.add_option("--prior", options.prior, "hash of the page before the first, or a seed: 64 hex digits");
  app.add_option("--lora-id", options.lora_id, "of the namespace, goes into the seed");
  app.add_option("--cache-salt", options.cache_salt, "likewise");
  app.add_option("--model", options.owner.model, "the model's name, in the keys of some backends");
  app.add_option("--attention", options.owner.attention, "mha or mla")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, Attention>{{"mha", Attention::mha}, {"mla", Attention::mla}},
          CLI::ignore_case));
  app.add_option("--layout", options.layout,
                 "of SGLang's host pool: page_first, page_first_direct, layer_first")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, PageLayout>{{"page_first", PageLayout::page_first},
                                            {"page_first_direct", PageLayout::page_first_direct},
                                            {"layer_first", PageLayout::layer_first},
                                            {"page_head", PageLayout::page_head}},
          CLI::ignore_case));
  app.add_option("--rank", options.owner.tp_rank, "tensor-parallel rank");
  app.add_option("--tp-size", options.owner.tp_size, "ranks")->check(CLI::Range(1u, 65536u));
  app.add_option("--pp-rank", options.owner.pp_rank, "pipeline stage");
  app.add_option("--pp-size", options.owner.pp_size, "stages")->check(CLI::Range(1u, 65536u));
  app.add_option(
      "--namespace", options.ns_digest,
      "digest of the namespace, 64 hex digits: for the keys that hold it (redis, file with format segment)");
  app.add_option("--redis-prefix", options.redis_prefix, "storage.redis.key_prefix")->capture_default_str();
  app.add_flag("--json", json, "as JSON");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : kExitUsage;
  }
  if (options.owner.tp_rank >= options.owner.tp_size || options.owner.pp_rank >= options.owner.pp_size) {
    fmt::print(stderr, "hicache-ctl: rank {} of {}, stage {} of {}: expected less than the number of all\n",
               options.owner.tp_rank, options.owner.tp_size, options.owner.pp_rank, options.owner.pp_size);
    return kExitUsage;
  }
  const auto pages = page_names(options);
  if (!pages) {
    fmt::print(stderr, "hicache-ctl: {}\n", pages.error().message);
    return kExitFailed;
  }
  std::fputs((json ? hash_json(*pages) : hash_text(*pages)).c_str(), stdout);
  return 0;
}

}  // namespace hicache::ctl
