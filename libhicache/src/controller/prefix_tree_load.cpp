// What comes back to the device, and how the tree shows itself.
#include <algorithm>
#include <string>

#include "node_storage.hpp"

namespace hicache {

Result<LoadBack> PrefixTree::load_back(NodeId id, std::uint64_t quota) {
  std::vector<Node*> chain;  // from the end upwards, turned round below
  Node* ancestor = find(id);
  if (ancestor == nullptr) {
    return Error{Status::not_found, "node " + std::to_string(id) + " is not in the tree", 0};
  }
  for (; !ancestor->is_root() && !ancestor->on_device(); ancestor = ancestor->parent) {
    chain.push_back(ancestor);
  }
  std::reverse(chain.begin(), chain.end());
  const auto slots_of_chain = [&] {
    std::vector<std::uint64_t> slots;
    for (const Node* node : chain) slots.insert(slots.end(), node->host.begin(), node->host.end());
    return slots;
  };
  const auto too_short = [&](std::uint64_t tokens) {
    return Error{Status::not_found,
                 std::to_string(tokens) + " tokens on the host; a load starts at " +
                     std::to_string(options_.load_back_threshold),
                 0};
  };
  // The ancestor must not be evicted to make room for its own descendants; what it takes out of the
  // evictable tokens is not there for this load.
  const std::uint64_t evictable = evictable_tokens();
  change_locks(ancestor, 1);
  const std::uint64_t locked = evictable - std::min(evictable, evictable_tokens());
  auto slots = slots_of_chain();
  if (slots.size() < options_.load_back_threshold) {
    change_locks(ancestor, -1);
    return too_short(slots.size());
  }
  if (slots.size() + locked > quota) {
    change_locks(ancestor, -1);
    return Error{Status::too_large,
                 std::to_string(slots.size()) + " tokens to load; the quota of " + std::to_string(quota) +
                     " leaves " + std::to_string(quota - std::min(quota, locked)),
                 0};
  }
  const auto hold = tier_.hold(slots);
  if (!hold) {
    change_locks(ancestor, -1);
    return hold.error();
  }
  if (hold->present_tokens < slots.size()) {
    // The pool has evicted the rest meanwhile: the tree learns it here, on every rank alike.
    std::uint64_t left = hold->present_tokens / options_.page_tokens;
    for (std::size_t i = 0; i < chain.size(); ++i) {
      if (left >= chain[i]->hashes.size()) {
        left -= chain[i]->hashes.size();
        continue;
      }
      Node* lost = chain[i];
      if (left > 0) {
        chain[i] = split(lost, left);
        ++i;
      }
      chain.resize(i);
      drop_host_below(lost);
      if (lost->children == 0 && lost->host_locks == 0) remove(lost);
      break;
    }
    slots = slots_of_chain();
  }
  if (hold->tokens < slots.size()) {
    // The rest stays: a longer prefix may end with a page that can be loaded.
    chain = leading_part(std::move(chain), hold->tokens / options_.page_tokens);
    slots = slots_of_chain();
  }
  if (chain.empty() || slots.size() < options_.load_back_threshold) {
    tier_.let_go(*hold);
    change_locks(ancestor, -1);
    return too_short(slots.size());
  }
  Node* end = chain.back();
  for (Node* node : chain) {
    ++node->host_locks;
    refresh(node);
  }
  auto device = tier_.load(*hold, slots, end->id);
  if (!device && device.status() == Status::no_space) {
    evict(slots.size());
    device = tier_.load(*hold, slots, end->id);
  }
  if (!device) {
    tier_.let_go(*hold);
    for (Node* node : chain) {
      --node->host_locks;
      refresh(node);
    }
    change_locks(ancestor, -1);
    drop_unfindable(chain.back());
    return device.error();
  }
  auto from = device->begin();
  for (Node* node : chain) {
    const auto to = from + static_cast<std::ptrdiff_t>(tokens_of(*node));
    node->load_of = end->id;
    set_device(node, std::vector<std::uint64_t>(from, to));
    from = to;
  }
  loading_[end->id] = true;
  change_locks(end, 1);
  change_locks(ancestor, -1);
  return LoadBack{end->id, std::move(*device)};
}

// The nodes with the first `pages` pages of a chain; the last one is cut where they end.
std::vector<PrefixTree::Node*> PrefixTree::leading_part(std::vector<Node*> chain, std::size_t pages) {
  for (std::size_t i = 0; i < chain.size(); ++i) {
    if (pages >= chain[i]->hashes.size()) {
      pages -= chain[i]->hashes.size();
      continue;
    }
    if (pages > 0) {
      chain[i] = split(chain[i], pages);
      ++i;
    }
    chain.resize(i);
  }
  return chain;
}

Result<std::uint64_t> PrefixTree::adopt(std::span<const PrefixHash> hashes) {
  ++clock_;
  Node* at = root_;
  std::size_t page = 0;
  while (page < hashes.size()) {
    Node* child = child_at(at, hashes[page]);
    if (child == nullptr) break;
    const std::size_t same = pages_in_common(*child, hashes.subspan(page));
    if (same < child->hashes.size()) child = split(child, same);
    at = child;
    page += same;
  }
  // Behind a page that the host does not have nothing can be found there.
  if (page == hashes.size() || !at->backed()) return std::uint64_t{0};
  const auto rest = hashes.subspan(page);
  // What is behind must not be given up to make room for it.
  ++at->host_locks;
  refresh(at);
  auto slots = tier_.adopt(rest);
  if (!slots && slots.status() == Status::no_space) {
    evict_host(rest.size() * options_.page_tokens -
               std::min(rest.size() * options_.page_tokens, tier_.host_available()));
    slots = tier_.adopt(rest);
  }
  --at->host_locks;
  refresh(at);
  if (!slots) return slots.error();
  if (slots->empty()) return std::uint64_t{0};
  const std::uint64_t tokens = slots->size();
  Node* node = add_node(at, rest.first(tokens / options_.page_tokens));
  set_host(node, std::move(*slots));
  return tokens;
}

void PrefixTree::end_load(const HiCacheAck& ack, NodeId id) {
  loading_.erase(id);
  std::vector<Node*> parts;
  std::vector<NodeId> ids;
  for (Node* node = find(id); node != nullptr && node->load_of == id; node = node->parent) {
    parts.push_back(node);
    ids.push_back(node->id);
  }
  for (Node* node : parts) {
    node->load_of = kNoOperation;
    --node->host_locks;
    node->bad = ack.status != Status::ok;
    refresh(node);
  }
  change_locks(find(id), -1);
  // From the end upwards, as far as no request holds them; unlock does the rest.
  for (Node* node : parts) {
    if (node->bad && node->locks == 0 && node->device_children == 0) give_up_device(node);
  }
  for (const NodeId part : ids) {
    if (Node* node = find(part); node != nullptr) drop_unfindable(node);
  }
}

// Device slots that hold nothing valid are given back; the host copy is what it was.
void PrefixTree::give_up_device(Node* node) {
  static_cast<void>(tier_.evict_device(take_device(node), {}));
  if (!node->on_host() && node->children == 0) remove(node);
}

// Takes one tier's copy of everything below a node away, and the nodes that are nowhere then. From the leaves
// upwards: prefixes may be longer than a stack.
void PrefixTree::forget(Node* top, ResetTiers tier) {
  std::vector<Node*> below{top};
  for (std::size_t i = 0; i < below.size(); ++i) {
    for (Node* child = below[i]->first_child; child != nullptr; child = child->next_sibling) {
      below.push_back(child);
    }
  }
  for (std::size_t i = below.size(); i-- > 1;) {
    Node* node = below[i];
    if (tier == ResetTiers::device) {
      node->locks = 0;
      take_device(node);
    } else {
      node->host_locks = 0;
      take_host(node);
    }
    refresh(node);
    if (node->on_device() || node->on_host()) continue;
    if (node->pinned_until != 0) {
      pinned_tokens_ -= tokens_of(*node);
      std::erase(pinned_, node->id);
    }
    unlink(node);
  }
}

std::vector<NodeId> PrefixTree::ids() const {
  std::vector<NodeId> out;
  storage_->for_each([&](const Node& node) {
    if (node.id != kRoot) out.push_back(node.id);
  });
  std::sort(out.begin(), out.end());
  return out;
}

Result<NodeView> PrefixTree::view(NodeId id) const {
  const Node* node = find(id);
  if (node == nullptr) {
    return Error{Status::not_found, "node " + std::to_string(id) + " is not in the tree", 0};
  }
  NodeView view;
  view.id = id;
  view.parent = node->is_root() ? kRoot : node->parent->id;
  view.hashes = node->hashes;
  view.device_slots = node->device;
  view.host_slots = node->host;
  view.locks = node->locks;
  view.host_locks = node->host_locks;
  view.hits = node->hits;
  view.writing = node->write_of != kNoOperation;
  view.pinned = node->pinned_until != 0;
  view.children = node->children;
  return view;
}

// Whether the node's host copy, or one below it that must stay findable from it, is in use.
bool PrefixTree::held_for_a_load(const Node& node) {
  std::vector<const Node*> below{&node};
  for (std::size_t i = 0; i < below.size(); ++i) {
    if (below[i]->host_locks > 0) return true;
    for (const Node* child = below[i]->first_child; child != nullptr; child = child->next_sibling) {
      below.push_back(child);
    }
  }
  return false;
}

std::string PrefixTree::check() const {
  std::uint64_t device = 0;
  std::uint64_t host = 0;
  std::uint64_t pinned = 0;
  std::size_t evictable = 0;
  std::size_t host_evictable = 0;
  std::string first_wrong;
  storage_->for_each([&](const Node& node) {
    const auto wrong = [&](const char* what) {
      if (first_wrong.empty()) first_wrong = "node " + std::to_string(node.id) + ": " + what;
    };
    std::uint32_t children = 0;
    std::uint32_t device_children = 0;
    for (const Node* child = node.first_child; child != nullptr; child = child->next_sibling) {
      ++children;
      device_children += child->on_device() ? 1 : 0;
      if (child->parent != &node) return wrong("a child names another parent");
    }
    if (children != node.children || device_children != node.device_children) {
      return wrong("its children are counted wrong");
    }
    if (node.is_root()) return;
    if (!node.on_device() && !node.on_host()) return wrong("it is nowhere");
    if (node.on_device() && node.device.size() != tokens_of(node)) return wrong("device slots missing");
    if (node.on_host() && node.host.size() != tokens_of(node)) return wrong("host slots missing");
    if (node.on_device() && !node.parent->is_root() && !node.parent->on_device()) {
      return wrong("it is on the device, its parent is not");
    }
    if (node.on_host() && node.write_of == kNoOperation && !node.parent->backed() && !held_for_a_load(node)) {
      return wrong("it is on the host, its parent is not");
    }
    if (!node.parent->is_root() && node.locks > node.parent->locks) return wrong("locked, its parent less");
    if (child_at(node.parent, node.hashes.front()) != &node) return wrong("it can't be found by its hash");
    device += node.device.size();
    host += node.host.size();
    if (node.pinned_until != 0) pinned += tokens_of(node);
    evictable += node.device_place ? 1 : 0;
    host_evictable += node.host_place ? 1 : 0;
  });
  if (!first_wrong.empty()) return first_wrong;
  if (device != device_tokens_ || host != host_tokens_ || pinned != pinned_tokens_) {
    return "the token counts are wrong";
  }
  if (evictable != device_order_.size() || host_evictable != host_order_.size()) {
    return "the eviction orders hold other nodes than those that are marked";
  }
  return {};
}

}  // namespace hicache
