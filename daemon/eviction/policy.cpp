#include "daemon/eviction/policy.hpp"

namespace hicache::daemon {
namespace {

class LeastRecentlyUsed final : public EvictionPolicy {
 public:
  [[nodiscard]] EvictionRank rank(const PageUse& use) const override { return {use.last_use, 0}; }
};

class LeastFrequentlyUsed final : public EvictionPolicy {
 public:
  [[nodiscard]] EvictionRank rank(const PageUse& use) const override { return {use.uses, use.last_use}; }
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_eviction_policy(EvictionPolicyName name) {
  switch (name) {
    case EvictionPolicyName::lru:
      return std::make_unique<LeastRecentlyUsed>();
    case EvictionPolicyName::lfu:
      return std::make_unique<LeastFrequentlyUsed>();
  }
  return std::make_unique<LeastRecentlyUsed>();
}

}  // namespace hicache::daemon
