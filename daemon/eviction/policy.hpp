// Which page goes first. A policy turns a page's use history into a rank; the lowest rank is evicted first.
// What may go at all (unpinned, ready, without cached children) is not the policy's business: see
// evictable_pages.hpp.
#pragma once

#include <compare>
#include <cstdint>
#include <memory>

#include "daemon/config.hpp"

namespace hicache::daemon {

// How a page was used: the stamp of its last request (0 = never) and how many requests used it.
struct PageUse {
  std::uint64_t last_use = 0;
  std::uint32_t uses = 0;
};

struct EvictionRank {
  std::uint64_t major = 0;
  std::uint64_t minor = 0;
  friend constexpr auto operator<=>(const EvictionRank&, const EvictionRank&) = default;
};

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;
  [[nodiscard]] virtual EvictionRank rank(const PageUse& use) const = 0;
};

// lru: least recently used first. lfu: least often used first, among equals the least recently used.
std::unique_ptr<EvictionPolicy> make_eviction_policy(EvictionPolicyName name);

}  // namespace hicache::daemon
