#include "hicache/controller/eviction_order.hpp"

#include <string>

namespace hicache {

Result<TreePolicy> parse_tree_policy(std::string_view name) {
  if (name == "lru") return TreePolicy::lru;
  if (name == "lfu") return TreePolicy::lfu;
  if (name == "scan_resistant") return TreePolicy::scan_resistant;
  return Error{Status::invalid_argument,
               "eviction policy '" + std::string(name) + "', expected lru, lfu or scan_resistant", 0};
}

std::size_t EvictionOrder::temperature(const NodeUse& use) const {
  return policy_ == TreePolicy::scan_resistant && (use.uses > 1 || use.returned) ? 1 : 0;
}

EvictionOrder::Key EvictionOrder::key(std::int64_t node, const NodeUse& use) const {
  switch (policy_) {
    case TreePolicy::lru:
      return {use.last_use, 0, node};
    case TreePolicy::lfu:
      return {use.uses, use.last_use, node};
    case TreePolicy::scan_resistant:
      return {temperature(use) == 1 ? use.last_use : use.created, 0, node};
  }
  return {};
}

void EvictionOrder::put(Place& place, std::int64_t node, const NodeUse& use, std::uint64_t tokens) {
  const std::size_t set = temperature(use);
  const Key wanted = key(node, use);
  if (place && place.set_ == set && place.tokens_ == tokens && *place.at_ == wanted) return;
  erase(place);
  // What was just used goes last with most policies: no search then.
  place.at_ = sets_[set].insert(sets_[set].end(), wanted);
  place.set_ = static_cast<std::uint8_t>(set);
  place.tokens_ = tokens;
  tokens_[set] += tokens;
}

void EvictionOrder::erase(Place& place) {
  if (!place) return;
  sets_[place.set_].erase(place.at_);
  tokens_[place.set_] -= place.tokens_;
  place = Place{};
}

const std::set<EvictionOrder::Key>& EvictionOrder::first_set() const {
  const auto& [cold, hot] = sets_;
  const bool hot_first = cold.empty() || (!hot.empty() && static_cast<double>(tokens_[1]) >
                                                              kHotShare * static_cast<double>(tokens()));
  return hot_first ? hot : cold;
}

std::int64_t EvictionOrder::first() const {
  const auto& set = first_set();
  return set.empty() ? -1 : set.begin()->node;
}

std::size_t EvictionOrder::next(std::span<std::int64_t> out) const {
  std::size_t n = 0;
  for (const Key& key : first_set()) {
    if (n == out.size()) break;
    out[n++] = key.node;
  }
  return n;
}

void EvictionOrder::clear() {
  for (auto& set : sets_) set.clear();
  tokens_ = {};
}

void GhostList::add(const PrefixHash& hash) {
  stamps_[hash] = ++next_;
  order_.emplace_back(hash, next_);
  while (order_.size() > capacity_) {
    const auto& [oldest, stamp] = order_.front();
    const auto at = stamps_.find(oldest);
    if (at != stamps_.end() && at->second == stamp) stamps_.erase(at);
    order_.pop_front();
  }
}

bool GhostList::take(const PrefixHash& hash) {
  return stamps_.erase(hash) == 1;
}

void GhostList::clear() {
  order_.clear();
  stamps_.clear();
}

}  // namespace hicache
