#include "hicache/controller/host_pool_size.hpp"

#include <limits>
#include <string>

#include "shm/pool_sizing.hpp"

namespace hicache {

Result<HostPoolSize> size_host_pool(const HostPoolRequest& r) {
  auto tokens = r.bytes > 0 ? slots_for_budget(r.bytes, r.bytes_per_token, r.page_tokens)
                            : slots_for_ratio(r.device_tokens, r.ratio, r.page_tokens);
  if (!tokens) return tokens.error();
  if (*tokens == 0 || r.bytes_per_token == 0 ||
      *tokens > std::numeric_limits<std::uint64_t>::max() / r.bytes_per_token) {
    return Error{Status::invalid_argument,
                 "a host pool of " + std::to_string(*tokens) + " tokens of " +
                     std::to_string(r.bytes_per_token) + " bytes; expected at least one page of " +
                     std::to_string(r.page_tokens) + " tokens",
                 0};
  }
  HostPoolSize size;
  size.tokens = *tokens;
  size.pages = *tokens / r.page_tokens;
  size.bytes = *tokens * r.bytes_per_token;
  size.smaller_than_device = *tokens <= r.device_tokens;
  return size;
}

std::uint64_t bytes_per_token(const NamespaceSpec& spec, bool all_ranks) {
  const std::uint64_t shard = spec.page_tokens == 0 ? 0 : spec.shard_bytes() / spec.page_tokens;
  return all_ranks ? shard * spec.shards() : shard;
}

}  // namespace hicache
