#include "tools/bench/workload.hpp"

#include <algorithm>
#include <optional>
#include <unordered_map>

#include "shm/prefix_hash.hpp"

namespace hicache::bench {
namespace {

// A step of a chain: prompts share prefixes, so most steps have been hashed already.
struct Step {
  PrefixHash prior;
  bool first = false;
  std::uint32_t block = 0;
  friend bool operator==(const Step&, const Step&) = default;
};
struct StepHash {
  std::size_t operator()(const Step& step) const noexcept {
    return (step.prior.words[0] ^ (step.block * 0x9e3779b97f4a7c15ull)) + (step.first ? 1 : 0);
  }
};

}  // namespace

Workload Workload::from_blocks(const BlockRequests& requests, std::uint32_t page_tokens) {
  Workload workload;
  std::unordered_map<Step, PrefixHash, StepHash> known;
  std::vector<std::uint32_t> tokens(page_tokens);
  for (const auto& blocks : requests) {
    std::optional<PrefixHash> prior;
    for (const std::uint32_t block : blocks) {
      const auto [at, fresh] =
          known.try_emplace(Step{prior.value_or(PrefixHash{}), !prior.has_value(), block}, PrefixHash{});
      if (fresh) {
        std::fill(tokens.begin(), tokens.end(), block);
        at->second = hash_page(tokens, prior);
      }
      prior = at->second;
      workload.keys_.push_back(*prior);
    }
    workload.offsets_.push_back(workload.keys_.size());
    workload.longest_ = std::max(workload.longest_, static_cast<std::uint32_t>(blocks.size()));
  }
  workload.distinct_ = known.size();
  return workload;
}

}  // namespace hicache::bench
