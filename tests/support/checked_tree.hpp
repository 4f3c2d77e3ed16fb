// A prefix tree and its model side by side: each call is made on both, and answers, everything asked of the
// tier and all nodes are compared after it. Throws std::logic_error at the first difference.
#pragma once

#include <stdexcept>
#include <string>

#include "tests/support/naive_tree.hpp"
#include "tests/support/replayed_tier.hpp"

namespace hicache::test {

class CheckedTree {
 public:
  CheckedTree(const PrefixTreeOptions& options, TreeTier& tier)
      : recorded_(tier),
        tree_(options, recorded_),
        replayed_(recorded_.calls()),
        model_(options, replayed_) {}

  PrefixMatch match(std::span<const PrefixHash> hashes) {
    auto real = tree_.match(hashes);
    const auto model = model_.match(list(hashes));
    agree("match", real.device_slots == model.device && real.host_tokens == model.host_tokens);
    require("match: device node", real.device_node == model_.id_of(model.device_node));
    require("match: host node", real.host_node == model_.id_of(model.host_node));
    return real;
  }
  Result<PrefixInsert> insert(std::span<const PrefixHash> hashes, std::span<const std::uint64_t> slots,
                              bool chunked = false) {
    auto real = tree_.insert(hashes, slots, chunked);
    if (!real) return real;
    const auto model = model_.insert(list(hashes), {slots.begin(), slots.end()}, chunked);
    agree("insert", real->matched_tokens == model.matched && real->duplicates == model.duplicates);
    require("insert: node", real->node == model_.id_of(model.node));
    return real;
  }
  Outcome lock(NodeId node) {
    const auto real = tree_.lock(node);
    if (real) model_.lock(model_.find(node));
    agree("lock", true);
    return real;
  }
  Outcome unlock(NodeId node) {
    const auto real = tree_.unlock(node);
    if (real) model_.unlock(model_.find(node));
    agree("unlock", true);
    return real;
  }
  std::uint64_t evict(std::uint64_t tokens) {
    const std::uint64_t real = tree_.evict(tokens);
    agree("evict", real == model_.evict(tokens));
    return real;
  }
  std::uint64_t evict_host(std::uint64_t tokens) {
    const std::uint64_t real = tree_.evict_host(tokens);
    agree("evict_host", real == model_.evict_host(tokens));
    return real;
  }
  Result<LoadBack> load_back(NodeId node, std::uint64_t quota) {
    auto real = tree_.load_back(node, quota);
    const auto model = model_.load_back(model_.find(node), quota);
    agree("load_back", real.status() == model.status && (!real || real->device_slots == model.device));
    if (real) require("load_back: node", real->node == model_.id_of(model.node));
    return real;
  }
  Result<std::uint64_t> adopt(std::span<const PrefixHash> hashes) {
    auto real = tree_.adopt(hashes);
    const auto model = model_.adopt(list(hashes));
    agree("adopt", real.ok() == model.has_value() && (!real || *real == *model));
    return real;
  }
  void apply(const HiCacheAck& ack) {
    tree_.apply(ack);
    model_.apply(ack);
    agree("apply", true);
  }
  void apply(const std::vector<HiCacheAck>& acks) {
    for (const HiCacheAck& ack : acks) apply(ack);
  }
  Outcome pin(std::span<const PrefixHash> hashes, std::uint64_t until) {
    const auto real = tree_.pin(hashes, until);
    agree("pin", real.status() == model_.pin(list(hashes), until));
    return real;
  }
  void expire_pins(std::uint64_t now) {
    tree_.expire_pins(now);
    model_.expire_pins(now);
    agree("expire_pins", true);
  }
  void reset() {
    recorded_.calls().clear();
    tree_.reset();
    model_.reset();
    agree("reset", true);
  }

  [[nodiscard]] std::string check() const { return tree_.check(); }
  [[nodiscard]] Result<NodeView> view(NodeId node) const { return tree_.view(node); }
  [[nodiscard]] std::uint64_t device_tokens() const { return tree_.device_tokens(); }
  [[nodiscard]] std::uint64_t host_tokens() const { return tree_.host_tokens(); }

 private:
  static std::vector<PrefixHash> list(std::span<const PrefixHash> hashes) {
    return {hashes.begin(), hashes.end()};
  }
  static void require(const std::string& what, bool right) {
    if (!right) throw std::logic_error("tree and model differ: " + what);
  }
  void agree(const std::string& call, bool answers) {
    require(call + ": the answer", answers);
    require(call + ": what was asked of the tier" +
                (recorded_.calls().empty() ? "" : ", only the tree says " + recorded_.calls().front().name),
            recorded_.calls().empty());
    const auto ids = tree_.ids();
    require(call + ": the number of nodes", ids.size() == model_.size());
    for (const NodeId id : ids) {
      const NodeView view = *tree_.view(id);
      NaiveTree::Node* node = model_.find_by_first(view.hashes.front());
      require(call + ": a node's first page", node != nullptr);
      if (model_.id_of(node) < 0) model_.call(node, id);
      require(call + ": a node's number", model_.id_of(node) == id);
    }
    for (const NodeId id : ids) {
      const NodeView view = *tree_.view(id);
      const NaiveTree::Node& node = *model_.find(id);
      const std::string who = call + ": node " + std::to_string(id) + ": its ";
      require(who + "parent", model_.id_of(node.parent) == view.parent);
      require(who + "pages", node.hashes == view.hashes);
      require(who + "device slots", node.device == view.device_slots);
      require(who + "host slots", node.host == view.host_slots);
      require(who + "locks", node.locks == view.locks && node.host_locks == view.host_locks);
      require(who + "hits", node.hits == view.hits);
      require(who + "write", (node.write_of != nullptr) == view.writing);
      require(who + "pin", (node.pinned_until != 0) == view.pinned);
      require(who + "children", model_.child_count(&node) == view.children);
    }
  }

  RecordingTier recorded_;
  PrefixTree tree_;
  ReplayedTier replayed_;
  NaiveTree model_;
};

}  // namespace hicache::test
