// Structure of the prefix tree: matching, insertion, splits, locks, pins.
#include "hicache/controller/prefix_tree.hpp"

#include <string>

#include "node_storage.hpp"

namespace hicache {
namespace {

Error gone(NodeId node) {
  return Error{Status::not_found, "node " + std::to_string(node) + " is not in the tree", 0};
}

}  // namespace

Result<WritePolicy> parse_write_policy(std::string_view name) {
  if (name == "write_through") return WritePolicy::write_through;
  if (name == "write_through_selective") return WritePolicy::write_through_selective;
  if (name == "write_back") return WritePolicy::write_back;
  return Error{Status::invalid_argument, "Invalid write policy: " + std::string(name), 0};
}

PrefixTree::PrefixTree(const PrefixTreeOptions& options, TreeTier& tier)
    : options_(options),
      tier_(tier),
      storage_(std::make_unique<Storage>()),
      device_order_(options.eviction),
      host_order_(options.eviction),
      ghosts_(options.ghosts) {
  reset();
}

PrefixTree::~PrefixTree() = default;

void PrefixTree::reset(ResetTiers tiers) {
  if (tiers != ResetTiers::both) return forget(root_, tiers);
  storage_ = std::make_unique<Storage>();
  device_order_.clear();
  host_order_.clear();
  ghosts_.clear();
  writing_.clear();
  loading_.clear();
  pinned_.clear();
  device_tokens_ = host_tokens_ = pinned_tokens_ = 0;
  clock_ = 0;
  root_ = storage_->add();
}

std::size_t PrefixTree::nodes() const {
  return storage_->count - 1;
}

PrefixTree::Node* PrefixTree::find(NodeId id) const {
  return storage_->find(id);
}

PrefixTree::Node* PrefixTree::child_at(Node* parent, const PrefixHash& first) const {
  const auto slot = storage_->first_pages.find(first, [&](std::uint32_t candidate) {
    const Node* node = storage_->at(candidate);
    return node->parent == parent && node->hashes.front() == first;
  });
  return slot < 0 ? nullptr : storage_->at(static_cast<std::uint32_t>(slot));
}

// A page's hash stands for all pages before it too: where the last ones agree, everything does.
// Precondition: the first ones agree.
std::size_t PrefixTree::pages_in_common(const Node& node, std::span<const PrefixHash> hashes) {
  std::size_t most = std::min(node.hashes.size(), hashes.size());
  if (node.hashes[most - 1] == hashes[most - 1]) return most;
  std::size_t same = 1;
  --most;
  while (same < most) {
    const std::size_t middle = same + (most - same + 1) / 2;
    if (node.hashes[middle - 1] == hashes[middle - 1]) {
      same = middle;
    } else {
      most = middle - 1;
    }
  }
  return same;
}

std::uint64_t PrefixTree::tokens_of(const Node& node) const {
  return std::uint64_t{node.hashes.size()} * options_.page_tokens;
}

void PrefixTree::touch(Node* node) {
  node->use.last_use = clock_;
  refresh(node);
}

void PrefixTree::leave_orders(Node* node) {
  device_order_.erase(node->device_place);
  host_order_.erase(node->host_place);
}

void PrefixTree::refresh_in(EvictionOrder& order, EvictionOrder::Place& place, Node* node, bool wanted) {
  if (wanted) {
    order.put(place, node->id, node->use, tokens_of(*node));
  } else {
    order.erase(place);
  }
}

// Puts a node where its state says it belongs. Every change of a node ends with it.
void PrefixTree::refresh(Node* node) {
  const bool at_rest = !node->is_root() && node->pinned_until == 0 && node->write_of == kNoOperation &&
                       node->load_of == kNoOperation;
  refresh_in(device_order_, node->device_place, node,
             at_rest && node->on_device() && node->device_children == 0 && node->locks == 0);
  refresh_in(
      host_order_, node->host_place, node,
      at_rest && !node->on_device() && node->on_host() && node->children == 0 && node->host_locks == 0);
}

PrefixTree::Node* PrefixTree::add_node(Node* parent, std::span<const PrefixHash> hashes) {
  Node* node = storage_->add();
  node->parent = parent;
  node->hashes.assign(hashes.begin(), hashes.end());
  node->use = {clock_, clock_, 0, remembers_ghosts() && ghosts_.take(hashes.front())};
  node->next_sibling = parent->first_child;
  if (parent->first_child != nullptr) parent->first_child->previous_sibling = node;
  parent->first_child = node;
  ++parent->children;
  storage_->first_pages.insert(node->hashes.front(), Storage::slot_of(node->id));
  refresh(parent);
  return node;
}

// Takes a node without children out of the tree. Its slots have gone before.
void PrefixTree::unlink(Node* node) {
  leave_orders(node);
  Node* parent = node->parent;
  (node->previous_sibling == nullptr ? parent->first_child : node->previous_sibling->next_sibling) =
      node->next_sibling;
  if (node->next_sibling != nullptr) node->next_sibling->previous_sibling = node->previous_sibling;
  --parent->children;
  storage_->first_pages.erase(node->hashes.front(), Storage::slot_of(node->id));
  if (remembers_ghosts()) ghosts_.add(node->hashes.front());
  storage_->remove(node);
  refresh(parent);
}

// Cuts a node after `pages` pages: a new parent takes them, the node keeps its id and the rest, so that acks
// in flight still find it.
PrefixTree::Node* PrefixTree::split(Node* node, std::size_t pages) {
  leave_orders(node);
  Node* top = storage_->add();
  const auto cut = static_cast<std::ptrdiff_t>(pages);
  const auto token_cut = static_cast<std::ptrdiff_t>(pages * options_.page_tokens);
  storage_->first_pages.replace(node->hashes.front(), Storage::slot_of(node->id), Storage::slot_of(top->id));
  top->hashes.assign(node->hashes.begin(), node->hashes.begin() + cut);
  node->hashes.erase(node->hashes.begin(), node->hashes.begin() + cut);
  for (auto slots : {&Node::device, &Node::host}) {
    if ((node->*slots).empty()) continue;
    (top->*slots).assign((node->*slots).begin(), (node->*slots).begin() + token_cut);
    (node->*slots).erase((node->*slots).begin(), (node->*slots).begin() + token_cut);
  }
  top->use = node->use;
  top->hits = node->hits;
  top->locks = node->locks;
  top->host_locks = node->host_locks;
  top->write_of = node->write_of;
  top->load_of = node->load_of;
  top->bad = node->bad;
  top->pinned_until = node->pinned_until;
  if (top->pinned_until != 0) pinned_.push_back(top->id);

  top->parent = node->parent;
  top->next_sibling = node->next_sibling;
  top->previous_sibling = node->previous_sibling;
  (top->previous_sibling == nullptr ? top->parent->first_child : top->previous_sibling->next_sibling) = top;
  if (top->next_sibling != nullptr) top->next_sibling->previous_sibling = top;
  node->parent = top;
  node->next_sibling = node->previous_sibling = nullptr;
  top->first_child = node;
  top->children = 1;
  top->device_children = node->on_device() ? 1 : 0;
  storage_->first_pages.insert(node->hashes.front(), Storage::slot_of(node->id));
  refresh(node);
  refresh(top);
  return top;
}

void PrefixTree::set_device(Node* node, std::vector<std::uint64_t> slots) {
  node->device = std::move(slots);
  device_tokens_ += node->device.size();
  ++node->parent->device_children;
  refresh(node);
  refresh(node->parent);
}

std::vector<std::uint64_t> PrefixTree::take_device(Node* node) {
  std::vector<std::uint64_t> slots = std::exchange(node->device, {});
  if (slots.empty()) return slots;
  device_tokens_ -= slots.size();
  --node->parent->device_children;
  node->bad = false;
  refresh(node);
  refresh(node->parent);
  return slots;
}

void PrefixTree::set_host(Node* node, std::vector<std::uint64_t> slots) {
  node->host = std::move(slots);
  host_tokens_ += node->host.size();
  refresh(node);
}

std::vector<std::uint64_t> PrefixTree::take_host(Node* node) {
  std::vector<std::uint64_t> slots = std::exchange(node->host, {});
  host_tokens_ -= slots.size();
  refresh(node);
  return slots;
}

PrefixMatch PrefixTree::match(std::span<const PrefixHash> hashes) {
  ++clock_;
  PrefixMatch found;
  Node* at = root_;
  bool on_device = true;
  for (std::size_t page = 0; page < hashes.size();) {
    Node* child = child_at(at, hashes[page]);
    if (child == nullptr || child->bad) break;
    const std::size_t same = pages_in_common(*child, hashes.subspan(page));
    if (same < child->hashes.size()) child = split(child, same);
    touch(child);
    on_device = on_device && child->on_device();
    if (on_device) {
      found.device_slots.insert(found.device_slots.end(), child->device.begin(), child->device.end());
      found.device_node = child->id;
    } else if (child->on_host()) {
      found.host_tokens += child->host.size();
    }
    if (child->on_host()) found.host_node = child->id;
    at = child;
    page += same;
  }
  return found;
}

Result<PrefixInsert> PrefixTree::insert(std::span<const PrefixHash> hashes,
                                        std::span<const std::uint64_t> device_slots, bool chunked) {
  if (device_slots.size() != hashes.size() * options_.page_tokens) {
    return Error{Status::invalid_argument,
                 std::to_string(device_slots.size()) + " device slots for " + std::to_string(hashes.size()) +
                     " pages of " + std::to_string(options_.page_tokens) + " tokens",
                 0};
  }
  ++clock_;
  PrefixInsert result;
  Node* at = root_;
  std::size_t page = 0;
  const auto slots_of = [&](std::size_t first, std::size_t count) {
    const auto part = device_slots.subspan(first * options_.page_tokens, count * options_.page_tokens);
    return std::vector<std::uint64_t>(part.begin(), part.end());
  };
  while (page < hashes.size()) {
    Node* child = child_at(at, hashes[page]);
    if (child == nullptr) break;
    const std::size_t same = pages_in_common(*child, hashes.subspan(page));
    if (same < child->hashes.size()) child = split(child, same);
    touch(child);
    auto given = slots_of(page, same);
    // What a failed load left is replaced by what was just computed.
    if (child->bad) static_cast<void>(tier_.evict_device(take_device(child), {}));
    if (!child->on_device()) {
      // The host copy stays; the device has one again without a load.
      static_cast<void>(tier_.revive(child->host));
      set_device(child, std::move(given));
    } else {
      for (std::size_t i = 0; i < given.size(); ++i) {
        if (given[i] != child->device[i]) result.duplicates.push_back(given[i]);
      }
    }
    count_use(child, chunked);
    at = child;
    page += same;
    result.matched_tokens += same * options_.page_tokens;
  }
  if (page < hashes.size()) {
    at = add_node(at, hashes.subspan(page));
    set_device(at, slots_of(page, hashes.size() - page));
    count_use(at, chunked);
  }
  result.node = at->id;
  return result;
}

void PrefixTree::count_use(Node* node, bool chunked) {
  if (chunked) return;
  ++node->use.uses;
  refresh(node);
  if (options_.write_policy == WritePolicy::write_back) return;
  ++node->hits;
  const std::uint32_t threshold =
      options_.write_policy == WritePolicy::write_through ? 1 : options_.selective_threshold;
  if (!node->on_host() && node->hits >= threshold) static_cast<void>(write_backup(node, false));
}

std::vector<PrefixHash> PrefixTree::chain_of(const Node* node) const {
  std::vector<const Node*> path;
  for (; !node->is_root(); node = node->parent) path.push_back(node);
  std::vector<PrefixHash> chain;
  for (auto at = path.rbegin(); at != path.rend(); ++at) {
    chain.insert(chain.end(), (*at)->hashes.begin(), (*at)->hashes.end());
  }
  return chain;
}

void PrefixTree::change_locks(Node* node, int by) {
  for (; !node->is_root(); node = node->parent) {
    node->locks = static_cast<std::uint32_t>(static_cast<int>(node->locks) + by);
    if (node->locks <= 1) refresh(node);
  }
}

Outcome PrefixTree::lock(NodeId id) {
  Node* node = find(id);
  if (node == nullptr) return gone(id);
  change_locks(node, 1);
  return success();
}

Outcome PrefixTree::unlock(NodeId id) {
  Node* node = find(id);
  if (node == nullptr) return gone(id);
  if (!node->is_root() && node->locks == 0) {
    return Error{Status::already_released, "node " + std::to_string(id) + " is not locked", 0};
  }
  change_locks(node, -1);
  while (node->bad && node->locks == 0 && node->device_children == 0) {
    Node* parent = node->parent;
    give_up_device(node);
    node = parent;
  }
  return success();
}

Outcome PrefixTree::lock_host(NodeId id) {
  Node* node = find(id);
  if (node == nullptr) return gone(id);
  ++node->host_locks;
  refresh(node);
  return success();
}

Outcome PrefixTree::unlock_host(NodeId id) {
  Node* node = find(id);
  if (node == nullptr) return gone(id);
  if (node->host_locks == 0) {
    return Error{Status::already_released, "the host copy of node " + std::to_string(id) + " is not locked",
                 0};
  }
  --node->host_locks;
  refresh(node);
  drop_unfindable(node);
  return success();
}

Outcome PrefixTree::pin(std::span<const PrefixHash> hashes, std::uint64_t until) {
  ++clock_;
  std::vector<Node*> path;
  std::uint64_t more = 0;
  Node* at = root_;
  for (std::size_t page = 0; page < hashes.size();) {
    Node* child = child_at(at, hashes[page]);
    const std::size_t rest = hashes.size() - page;
    if (child == nullptr ||
        !std::equal(child->hashes.begin(),
                    child->hashes.begin() + static_cast<std::ptrdiff_t>(std::min(rest, child->hashes.size())),
                    hashes.begin() + static_cast<std::ptrdiff_t>(page))) {
      return Error{Status::not_found,
                   "page " + std::to_string(page) + " of the prefix is not in the tree: insert it first", 0};
    }
    if (rest < child->hashes.size()) child = split(child, rest);
    if (child->pinned_until == 0) more += tokens_of(*child);
    path.push_back(child);
    page += child->hashes.size();
    at = child;
  }
  if (pinned_tokens_ + more > options_.pinnable_tokens) {
    return Error{Status::no_space,
                 "pinning " + std::to_string(more) + " more tokens than the " +
                     std::to_string(pinned_tokens_) + " pinned now; at most " +
                     std::to_string(options_.pinnable_tokens),
                 0};
  }
  for (Node* node : path) {
    if (node->pinned_until == 0) pinned_.push_back(node->id);
    node->pinned_until = std::max({node->pinned_until, until, std::uint64_t{1}});
    refresh(node);
  }
  pinned_tokens_ += more;
  return success();
}

void PrefixTree::expire_pins(std::uint64_t now) {
  std::erase_if(pinned_, [&](NodeId id) {
    Node* node = find(id);
    if (node->pinned_until > now) return false;
    node->pinned_until = 0;
    pinned_tokens_ -= tokens_of(*node);
    refresh(node);
    return true;
  });
}

}  // namespace hicache
