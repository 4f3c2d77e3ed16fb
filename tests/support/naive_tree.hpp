// The prefix tree's rules once more, as plainly as they can be written: no index, no counters, no orders.
// Every question is answered by looking at all nodes. It asks a tier as the real tree does; given a tier that
// replays what the real tree's tier was asked (replayed_tier.hpp), every decision of the two is compared.
#pragma once

#include <algorithm>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "hicache/controller/prefix_tree.hpp"

namespace hicache::test {

class NaiveTree {
 public:
  using Slots = std::vector<std::uint64_t>;
  using Hashes = std::vector<PrefixHash>;

  struct Node {
    Node* parent = nullptr;
    Hashes hashes;
    Slots device;
    Slots host;
    std::uint64_t last_use = 0;
    std::uint64_t created = 0;
    std::uint32_t uses = 0;
    bool returned = false;
    std::uint32_t hits = 0;
    std::uint32_t locks = 0;
    std::uint32_t host_locks = 0;
    const Node* write_of = nullptr;
    const Node* load_of = nullptr;
    bool bad = false;
    std::uint64_t pinned_until = 0;
  };

  NaiveTree(const PrefixTreeOptions& options, TreeTier& tier) : o_(options), tier_(tier) { reset(); }

  void reset() {
    nodes_.clear();
    nodes_.emplace_back();
    ghosts_.clear();
    writing_.clear();
    loading_.clear();
    ids_.clear();
    clock_ = 0;
  }

  struct Match {
    Slots device;
    Node* device_node = nullptr;
    Node* host_node = nullptr;
    std::uint64_t host_tokens = 0;
  };
  Match match(const Hashes& hashes) {
    ++clock_;
    Match found{{}, root(), root(), 0};
    bool on_device = true;
    for (Node* node : walk(hashes, true)) {
      node->last_use = clock_;
      on_device = on_device && !node->device.empty();
      if (on_device) {
        found.device.insert(found.device.end(), node->device.begin(), node->device.end());
        found.device_node = node;
      } else {
        found.host_tokens += node->host.size();
      }
      if (!node->host.empty()) found.host_node = node;
    }
    return found;
  }

  struct Insert {
    Node* node = nullptr;
    std::uint64_t matched = 0;
    Slots duplicates;
  };
  Insert insert(const Hashes& hashes, const Slots& slots, bool chunked) {
    ++clock_;
    Insert result{root(), 0, {}};
    const auto part = [&](std::size_t page, std::size_t pages) {
      const auto first = slots.begin() + static_cast<std::ptrdiff_t>(page * o_.page_tokens);
      return Slots(first, first + static_cast<std::ptrdiff_t>(pages * o_.page_tokens));
    };
    std::size_t page = 0;
    while (page < hashes.size()) {
      Node* node = step(result.node, hashes, page);
      if (node == nullptr) break;
      node->last_use = clock_;
      const Slots given = part(page, node->hashes.size());
      if (node->bad) {
        static_cast<void>(tier_.evict_device(node->device, {}));
        node->device.clear();
        node->bad = false;
      }
      if (node->device.empty()) {
        static_cast<void>(tier_.revive(node->host));
        node->device = given;
      } else {
        for (std::size_t i = 0; i < given.size(); ++i) {
          if (given[i] != node->device[i]) result.duplicates.push_back(given[i]);
        }
      }
      used(node, chunked);
      page += node->hashes.size();
      result.node = node;
    }
    result.matched = page * o_.page_tokens;
    if (page < hashes.size()) {
      Node* node = add(result.node, {hashes.begin() + static_cast<std::ptrdiff_t>(page), hashes.end()});
      node->device = part(page, hashes.size() - page);
      used(node, chunked);
      result.node = node;
    }
    return result;
  }

  void lock(Node* node) { change_locks(node, 1); }
  void unlock(Node* node) {
    change_locks(node, -1);
    for (Node* at = node; at != root() && at->bad && at->locks == 0 && resident_below(at) == 0;) {
      Node* parent = at->parent;
      give_up(at);
      at = parent;
    }
  }

  std::uint64_t evict(std::uint64_t tokens) {
    std::uint64_t freed = 0;
    for (;;) {
      std::vector<Node*> written;
      std::uint64_t coming = 0;
      while (freed + coming < tokens) {
        Node* node = victim(true);
        if (node == nullptr) break;
        const std::uint64_t size = tokens_of(node);
        if (!node->host.empty()) {
          demote(node);
          freed += size;
        } else if (o_.write_policy == WritePolicy::write_back && write(node, true)) {
          written.push_back(node);
          coming += size;
        } else {
          remove(node);
          freed += size;
        }
      }
      if (written.empty()) return freed;
      if (const auto acks = tier_.finish_writes()) {
        for (const HiCacheAck& ack : *acks) apply(ack);
      }
      for (Node* node : written) {
        if (!alive(node) || node->device.empty()) continue;
        if (node->write_of != nullptr) return freed;
        freed += tokens_of(node);
        node->host.empty() ? remove(node) : demote(node);
      }
    }
  }

  std::uint64_t evict_host(std::uint64_t tokens) {
    std::uint64_t freed = 0;
    while (freed < tokens) {
      Node* node = victim(false);
      if (node == nullptr) break;
      const std::size_t pages = (tokens - freed + o_.page_tokens - 1) / o_.page_tokens;
      if (pages < node->hashes.size()) split(node, node->hashes.size() - pages);
      freed += tokens_of(node);
      remove(node);
    }
    return freed;
  }

  struct Load {
    Status status = Status::ok;
    Node* node = nullptr;
    Slots device;
  };
  Load load_back(Node* end, std::uint64_t quota) {
    std::vector<Node*> chain;
    Node* ancestor = end;
    for (; ancestor != root() && ancestor->device.empty(); ancestor = ancestor->parent) {
      chain.insert(chain.begin(), ancestor);
    }
    const std::uint64_t before = evictable_tokens();
    change_locks(ancestor, 1);
    const std::uint64_t locked = before - evictable_tokens();
    const auto end_with = [&](Status status) {
      change_locks(ancestor, -1);
      return Load{status, nullptr, {}};
    };
    Slots slots = host_of(chain);
    if (slots.size() < o_.load_back_threshold) return end_with(Status::not_found);
    if (slots.size() + locked > quota) return end_with(Status::too_large);
    const auto hold = tier_.hold(slots);
    if (!hold) return end_with(hold.status());
    if (hold->present_tokens < slots.size()) {
      Node* lost = cut(chain, hold->present_tokens);
      drop_below(lost);
      if (children(lost).empty() && lost->host_locks == 0) remove(lost);
    }
    if (hold->tokens < host_of(chain).size()) cut(chain, hold->tokens);
    slots = host_of(chain);
    if (chain.empty() || slots.size() < o_.load_back_threshold) {
      tier_.let_go(*hold);
      return end_with(Status::not_found);
    }
    for (Node* node : chain) ++node->host_locks;
    auto device = tier_.load(*hold, slots, id_of(chain.back()));
    if (!device && device.status() == Status::no_space) {
      evict(slots.size());
      device = tier_.load(*hold, slots, id_of(chain.back()));
    }
    if (!device) {
      tier_.let_go(*hold);
      for (Node* node : chain) --node->host_locks;
      const Load failed = end_with(device.status());
      drop_unfindable(chain.back());
      return failed;
    }
    auto from = device->begin();
    for (Node* node : chain) {
      const auto to = from + static_cast<std::ptrdiff_t>(tokens_of(node));
      node->device.assign(from, to);
      node->load_of = chain.back();
      from = to;
    }
    loading_.insert(chain.back());
    change_locks(chain.back(), 1);
    change_locks(ancestor, -1);
    return Load{Status::ok, chain.back(), *device};
  }

  std::optional<std::uint64_t> adopt(const Hashes& hashes) {
    ++clock_;
    Node* at = root();
    std::size_t page = 0;
    while (page < hashes.size()) {
      Node* node = step(at, hashes, page);
      if (node == nullptr) break;
      at = node;
      page += node->hashes.size();
    }
    if (page == hashes.size() || !backed(at)) return 0;
    const Hashes rest(hashes.begin() + static_cast<std::ptrdiff_t>(page), hashes.end());
    ++at->host_locks;
    auto slots = tier_.adopt(rest);
    if (!slots && slots.status() == Status::no_space) {
      const std::uint64_t wanted = rest.size() * o_.page_tokens;
      evict_host(wanted - std::min(wanted, tier_.host_available()));
      slots = tier_.adopt(rest);
    }
    --at->host_locks;
    if (!slots) return std::nullopt;
    if (slots->empty()) return 0;
    Node* node =
        add(at, {rest.begin(), rest.begin() + static_cast<std::ptrdiff_t>(slots->size() / o_.page_tokens)});
    node->host = *slots;
    return slots->size();
  }

  Status pin(const Hashes& hashes, std::uint64_t until) {
    ++clock_;
    std::size_t known = 0;
    for (const Node* at = root(); known < hashes.size();) {
      const Node* node = child(at, hashes[known]);
      if (node == nullptr ||
          common(node, hashes, known) < std::min(node->hashes.size(), hashes.size() - known)) {
        return Status::not_found;
      }
      known += std::min(node->hashes.size(), hashes.size() - known);
      at = node;
    }
    std::uint64_t pinned = 0;
    for (const Node& node : nodes_) pinned += node.pinned_until != 0 ? tokens_of(&node) : 0;
    const auto path = walk(hashes, false);
    for (const Node* node : path) pinned += node->pinned_until == 0 ? tokens_of(node) : 0;
    if (pinned > o_.pinnable_tokens) return Status::no_space;
    for (Node* node : path) node->pinned_until = std::max({node->pinned_until, until, std::uint64_t{1}});
    return Status::ok;
  }
  void expire_pins(std::uint64_t now) {
    for (Node& node : nodes_) {
      if (node.pinned_until != 0 && node.pinned_until <= now) node.pinned_until = 0;
    }
  }

  void apply(const HiCacheAck& ack) {
    for (const NodeId id : ack.node_ids) {
      Node* node = find(id);
      if (node == nullptr) continue;
      if (ack.kind == OperationKind::write && writing_.contains(node)) end_write(node, ack);
      if (ack.kind == OperationKind::load && loading_.contains(node)) end_load(node, ack);
    }
  }

  // The real tree's number of a node: learnt when it is first heard of, the same ever after.
  void call(Node* node, NodeId id) {
    if (node != root()) ids_[node] = id;
  }
  // -1: not heard of yet.
  [[nodiscard]] NodeId id_of(const Node* node) const {
    if (node == &nodes_.front()) return PrefixTree::kRoot;
    const auto at = ids_.find(node);
    return at == ids_.end() ? -1 : at->second;
  }
  Node* find(NodeId id) {
    for (const auto& [node, known] : ids_) {
      if (known == id) return const_cast<Node*>(node);
    }
    return id == PrefixTree::kRoot ? root() : nullptr;
  }
  Node* find_by_first(const PrefixHash& hash) {
    for (Node& node : nodes_) {
      if (node.parent != nullptr && node.hashes.front() == hash) return &node;
    }
    return nullptr;
  }
  [[nodiscard]] std::size_t size() const { return nodes_.size() - 1; }
  [[nodiscard]] std::size_t child_count(const Node* node) const { return children(node).size(); }

 private:
  Node* root() { return &nodes_.front(); }
  [[nodiscard]] const Node* root() const { return &nodes_.front(); }
  [[nodiscard]] std::uint64_t tokens_of(const Node* node) const {
    return std::uint64_t{node->hashes.size()} * o_.page_tokens;
  }
  [[nodiscard]] bool alive(const Node* wanted) const {
    return std::any_of(nodes_.begin(), nodes_.end(), [&](const Node& node) { return &node == wanted; });
  }
  [[nodiscard]] bool backed(const Node* node) const { return node == root() || !node->host.empty(); }
  [[nodiscard]] std::vector<const Node*> children(const Node* parent) const {
    std::vector<const Node*> found;
    for (const Node& node : nodes_) {
      if (node.parent == parent) found.push_back(&node);
    }
    return found;
  }
  [[nodiscard]] std::size_t resident_below(const Node* node) const {
    const auto all = children(node);
    return static_cast<std::size_t>(
        std::count_if(all.begin(), all.end(), [](const Node* child) { return !child->device.empty(); }));
  }
  static Slots host_of(const std::vector<Node*>& chain) {
    Slots slots;
    for (const Node* node : chain) slots.insert(slots.end(), node->host.begin(), node->host.end());
    return slots;
  }

  Node* child(const Node* parent, const PrefixHash& first) {
    for (Node& node : nodes_) {
      if (node.parent == parent && node.hashes.front() == first) return &node;
    }
    return nullptr;
  }
  static std::size_t common(const Node* node, const Hashes& hashes, std::size_t page) {
    std::size_t same = 0;
    while (same < node->hashes.size() && page + same < hashes.size() &&
           node->hashes[same] == hashes[page + same]) {
      ++same;
    }
    return same;
  }
  // The child that continues the prefix, cut where the prefix leaves it.
  Node* step(Node* at, const Hashes& hashes, std::size_t page) {
    Node* node = child(at, hashes[page]);
    if (node == nullptr) return nullptr;
    const std::size_t same = common(node, hashes, page);
    return same < node->hashes.size() ? split(node, same) : node;
  }
  std::vector<Node*> walk(const Hashes& hashes, bool stop_at_bad) {
    std::vector<Node*> path;
    Node* at = root();
    for (std::size_t page = 0; page < hashes.size();) {
      const Node* next = child(at, hashes[page]);
      if (next == nullptr || (stop_at_bad && next->bad)) break;
      at = step(at, hashes, page);
      path.push_back(at);
      page += at->hashes.size();
    }
    return path;
  }
  // The first `pages` pages in a new parent; it is returned.
  Node* split(Node* node, std::size_t pages) {
    Node top = *node;
    const auto tokens = static_cast<std::ptrdiff_t>(pages * o_.page_tokens);
    top.hashes.resize(pages);
    node->hashes.erase(node->hashes.begin(), node->hashes.begin() + static_cast<std::ptrdiff_t>(pages));
    for (auto slots : {&Node::device, &Node::host}) {
      if ((node->*slots).empty()) continue;
      (top.*slots).resize(static_cast<std::size_t>(tokens));
      (node->*slots).erase((node->*slots).begin(), (node->*slots).begin() + tokens);
    }
    nodes_.push_back(std::move(top));
    node->parent = &nodes_.back();
    return &nodes_.back();
  }
  Node* add(Node* parent, Hashes hashes) {
    Node node;
    node.parent = parent;
    node.hashes = std::move(hashes);
    node.last_use = node.created = clock_;
    node.returned = ghosts_.erase(node.hashes.front().words) == 1;
    nodes_.push_back(std::move(node));
    return &nodes_.back();
  }
  // Cuts a chain after so many tokens; the first node that is left out.
  Node* cut(std::vector<Node*>& chain, std::uint64_t tokens) {
    std::size_t pages = tokens / o_.page_tokens;
    for (std::size_t i = 0; i < chain.size(); ++i) {
      if (pages >= chain[i]->hashes.size()) {
        pages -= chain[i]->hashes.size();
        continue;
      }
      Node* rest = chain[i];
      if (pages > 0) chain[i++] = split(rest, pages);
      chain.resize(i);
      return rest;
    }
    return nullptr;
  }

  void used(Node* node, bool chunked) {
    if (chunked) return;
    ++node->uses;
    if (o_.write_policy == WritePolicy::write_back) return;
    ++node->hits;
    const std::uint32_t threshold =
        o_.write_policy == WritePolicy::write_through ? 1 : o_.selective_threshold;
    if (node->host.empty() && node->hits >= threshold) static_cast<void>(write(node, false));
  }
  bool write(Node* node, bool write_back) {
    if (!backed(node->parent) && (!write_back || !write(node->parent, true))) return false;
    Hashes chain;
    for (const Node* at = node; at != root(); at = at->parent) {
      chain.insert(chain.begin(), at->hashes.begin(), at->hashes.end());
    }
    auto slots = tier_.write(node->device, chain, id_of(node));
    if (!slots && slots.status() == Status::no_space) {
      evict_host(tokens_of(node) - tier_.host_available());
      slots = tier_.write(node->device, chain, id_of(node));
    }
    if (!slots) return false;
    node->write_of = node;
    node->host = *slots;
    writing_[node] = write_back;
    if (!write_back) change_locks(node, 1);
    return true;
  }
  void end_write(Node* end, const HiCacheAck& ack) {
    const bool write_back = writing_.at(end);
    writing_.erase(end);
    std::vector<Node*> parts;
    for (Node* node = end; node->write_of == end; node = node->parent) parts.insert(parts.begin(), node);
    std::uint64_t tokens = 0;
    Node* lost = nullptr;
    for (Node* node : parts) {
      tokens += tokens_of(node);
      node->write_of = nullptr;
      if (tokens <= ack.host_tokens && backed(node->parent)) continue;
      static_cast<void>(tier_.evict_host(node->host));
      node->host.clear();
      if (lost == nullptr) lost = node;
    }
    if (!write_back) change_locks(end, -1);
    if (lost != nullptr) drop_below(lost);
  }
  void end_load(Node* end, const HiCacheAck& ack) {
    loading_.erase(end);
    std::vector<Node*> parts;
    for (Node* node = end; node->load_of == end; node = node->parent) parts.push_back(node);
    for (Node* node : parts) {
      node->load_of = nullptr;
      --node->host_locks;
      node->bad = ack.status != Status::ok;
    }
    change_locks(end, -1);
    for (Node* node : parts) {
      if (node->bad && node->locks == 0 && resident_below(node) == 0) give_up(node);
    }
    for (Node* node : parts) {
      if (alive(node)) drop_unfindable(node);
    }
  }
  // What a load held while its prefix left the host.
  void drop_unfindable(Node* node) {
    Node* top = nullptr;
    for (; node != root(); node = node->parent) {
      if (!node->host.empty() && !backed(node->parent)) top = node->parent;
    }
    if (top != nullptr) drop_below(top);
  }
  void give_up(Node* node) {
    static_cast<void>(tier_.evict_device(node->device, {}));
    node->device.clear();
    node->bad = false;
    if (node->host.empty() && children(node).empty()) remove(node);
  }
  void demote(Node* node) {
    static_cast<void>(tier_.evict_device(node->device, node->bad ? Slots{} : node->host));
    node->device.clear();
    node->bad = false;
  }
  void remove(Node* node) {
    if (!node->device.empty()) static_cast<void>(tier_.evict_device(node->device, {}));
    if (!node->host.empty()) static_cast<void>(tier_.evict_host(node->host));
    if (o_.eviction == TreePolicy::scan_resistant) ghosts_.insert(node->hashes.front().words);
    ids_.erase(node);
    nodes_.remove_if([&](const Node& other) { return &other == node; });
  }
  // Deepest first, and of siblings whichever: what happens to one does not depend on the other.
  void drop_below(Node* top) {
    std::vector<Node*> below;
    for (Node& node : nodes_) {
      for (const Node* up = node.parent; up != nullptr; up = up->parent) {
        if (up == top) below.push_back(&node);
      }
    }
    const auto depth = [](const Node* node) {
      std::size_t n = 0;
      for (; node->parent != nullptr; node = node->parent) ++n;
      return n;
    };
    std::stable_sort(below.begin(), below.end(),
                     [&](const Node* a, const Node* b) { return depth(a) > depth(b); });
    for (Node* node : below) {
      if (node->write_of != nullptr || node->load_of != nullptr || node->host_locks > 0) continue;
      if (node->device.empty() && children(node).empty()) {
        remove(node);
      } else if (!node->device.empty() && !node->host.empty()) {
        static_cast<void>(tier_.evict_host(node->host));
        node->host.clear();
      }
    }
  }
  void change_locks(Node* node, int by) {
    for (; node != root(); node = node->parent) {
      node->locks = static_cast<std::uint32_t>(static_cast<int>(node->locks) + by);
    }
  }

  [[nodiscard]] bool may_go(const Node& node, bool device) const {
    if (&node == root() || node.pinned_until != 0 || node.write_of != nullptr || node.load_of != nullptr) {
      return false;
    }
    if (device) return !node.device.empty() && node.locks == 0 && resident_below(&node) == 0;
    return node.device.empty() && !node.host.empty() && node.host_locks == 0 && children(&node).empty();
  }
  [[nodiscard]] std::uint64_t evictable_tokens() const {
    std::uint64_t tokens = 0;
    for (const Node& node : nodes_) tokens += may_go(node, true) ? tokens_of(&node) : 0;
    return tokens;
  }
  Node* victim(bool device) {
    std::uint64_t tokens[2] = {0, 0};
    Node* first[2] = {nullptr, nullptr};
    const auto rank = [&](const Node& node, bool hot) {
      switch (o_.eviction) {
        case TreePolicy::lru:
          return std::pair<std::uint64_t, std::uint64_t>{node.last_use, 0};
        case TreePolicy::lfu:
          return std::pair<std::uint64_t, std::uint64_t>{node.uses, node.last_use};
        case TreePolicy::scan_resistant:
          break;
      }
      return std::pair<std::uint64_t, std::uint64_t>{hot ? node.last_use : node.created, 0};
    };
    for (Node& node : nodes_) {
      if (!may_go(node, device)) continue;
      const bool hot = o_.eviction == TreePolicy::scan_resistant && (node.uses > 1 || node.returned);
      tokens[hot] += tokens_of(&node);
      if (first[hot] == nullptr || rank(node, hot) < rank(*first[hot], hot)) first[hot] = &node;
    }
    const bool too_hot = static_cast<double>(tokens[1]) > 0.9 * static_cast<double>(tokens[0] + tokens[1]);
    return first[0] == nullptr || (first[1] != nullptr && too_hot) ? first[1] : first[0];
  }

  PrefixTreeOptions o_;
  TreeTier& tier_;
  std::list<Node> nodes_;  // the first one is the root
  std::set<std::array<std::uint64_t, 4>> ghosts_;
  std::map<const Node*, bool> writing_;
  std::set<const Node*> loading_;
  std::map<const Node*, NodeId> ids_;
  std::uint64_t clock_ = 0;
};

}  // namespace hicache::test
