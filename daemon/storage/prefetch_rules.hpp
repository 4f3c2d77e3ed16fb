// The arithmetic of prefetching: when one begins, how much may be in flight, how long one may take. Pure.
#pragma once

#include <algorithm>
#include <cstdint>

namespace hicache::daemon {

// Tokens from which on a prefetch is worth its while: the configured number, and never less than a page.
constexpr std::uint64_t prefetch_threshold(std::uint64_t configured_tokens, std::uint32_t page_tokens) {
  return std::max<std::uint64_t>(configured_tokens, page_tokens);
}

// Whole pages of a request: what is behind the last page boundary is never cached.
constexpr std::uint64_t whole_page_tokens(std::uint64_t tokens, std::uint32_t page_tokens) {
  return tokens - tokens % page_tokens;
}

constexpr bool worth_prefetching(std::uint64_t tokens, std::uint64_t configured_tokens,
                                 std::uint32_t page_tokens) {
  return whole_page_tokens(tokens, page_tokens) >= prefetch_threshold(configured_tokens, page_tokens);
}

// Room that prefetches may hold together, in the unit of `pool`. A share of the host pool alone: the size of
// device pools does not enter, so it is never zero or negative, whatever their ratio.
constexpr std::uint64_t prefetch_capacity(std::uint64_t pool, double fraction) {
  return std::max<std::uint64_t>(static_cast<std::uint64_t>(static_cast<double>(pool) * fraction), 1);
}

// The limit is looked at before a prefetch begins and may be passed by one of them.
constexpr bool prefetch_allowed(std::uint64_t held, std::uint64_t capacity) {
  return held < capacity;
}

// How long a prefetch of `tokens` tokens may take under the policy `timeout`.
struct PrefetchTimeLimit {
  std::uint64_t base_us = 0;
  std::uint64_t per_ki_token_us = 0;
  std::uint64_t max_us = 0;  // 0 = no bound

  [[nodiscard]] constexpr std::uint64_t us_for(std::uint64_t tokens) const {
    const std::uint64_t us = base_us + tokens * per_ki_token_us / 1024;
    return max_us == 0 ? us : std::min(us, max_us);
  }
};

}  // namespace hicache::daemon
