// hicache-ctl hash: the hashes of a prompt's pages and the names under which storage backends keep them. Asks
// no daemon.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "shm/page_keys.hpp"
#include "shm/page_layout.hpp"
#include "shm/status.hpp"
#include "shm/types.hpp"

namespace hicache::ctl {

struct HashOptions {
  std::vector<std::int64_t> tokens;
  std::uint32_t page_tokens = 0;
  std::optional<std::string> prior;    // 64 hex digits: the hash of the page before, or a seed
  std::optional<std::string> lora_id;  // both make the seed where there is no prior
  std::optional<std::string> cache_salt;
  std::optional<std::string> ns_digest;  // 64 hex digits: for the keys that hold the namespace
  std::string redis_prefix = "hicache";
  KeyOwner owner;
  PageLayout layout = PageLayout::page_first;
};

struct NamedKey {
  std::string backend;
  std::vector<std::string> keys;
};
struct PageNames {
  PrefixHash hash;
  std::vector<NamedKey> keys;
};

// One entry for each full page. invalid_argument for tokens, digests or sizes that can't be.
Result<std::vector<PageNames>> page_names(const HashOptions& options);

// The command line behind "hicache-ctl hash"; the exit status.
int run_hash(int argc, char** argv);

}  // namespace hicache::ctl
