// What leaves the device: copies to the host, and evictions on both tiers.
#include <array>

#include "node_storage.hpp"

namespace hicache {
namespace {

constexpr std::size_t kVictimsAtOnce = 16;

}  // namespace

// Starts to copy a node to the host. False when that is not possible now: the node stays as it is.
bool PrefixTree::write_backup(Node* node, bool write_back) {
  // A page without its parent on the host could never be found again.
  if (!node->parent->backed() && (!write_back || !write_backup(node->parent, true))) return false;
  const auto chain = chain_of(node);
  auto slots = tier_.write(node->device, chain, node->id);
  if (!slots && slots.status() == Status::no_space) {
    evict_host(tokens_of(*node) - tier_.host_available());
    slots = tier_.write(node->device, chain, node->id);
  }
  if (!slots) return false;
  node->write_of = node->id;
  writing_[node->id] = write_back;
  set_host(node, std::move(*slots));
  // While it is written the device copy must stay; write_back waits for the end anyway.
  if (!write_back) change_locks(node, 1);
  return true;
}

// Takes the device copy away; the host has the page. One that a failed load left was never a copy.
void PrefixTree::demote(Node* node) {
  const bool was_copy = !node->bad;
  const auto slots = take_device(node);
  static_cast<void>(tier_.evict_device(slots, was_copy ? std::span(node->host) : std::span<std::uint64_t>()));
}

// Takes a node without children away that is nowhere else.
void PrefixTree::remove(Node* node) {
  if (node->on_device()) static_cast<void>(tier_.evict_device(take_device(node), {}));
  if (node->on_host()) static_cast<void>(tier_.evict_host(take_host(node)));
  if (node->pinned_until != 0) {
    pinned_tokens_ -= tokens_of(*node);
    std::erase(pinned_, node->id);
  }
  unlink(node);
}

// The host lost a page: whatever lies behind it can't be found there any more.
void PrefixTree::drop_host_below(Node* top) {
  std::vector<Node*> below{top};
  for (std::size_t i = 0; i < below.size(); ++i) {
    for (Node* child = below[i]->first_child; child != nullptr; child = child->next_sibling) {
      below.push_back(child);
    }
  }
  for (std::size_t i = below.size(); i-- > 1;) {
    Node* node = below[i];
    if (node->write_of != kNoOperation || node->load_of != kNoOperation || node->host_locks > 0) continue;
    if (!node->on_device() && node->children == 0) {
      remove(node);
    } else if (node->on_device() && node->on_host()) {
      static_cast<void>(tier_.evict_host(take_host(node)));
    }
  }
}

// A node on the path has lost its host copy while something below it was held for a load and stayed. What
// holds no longer goes now.
void PrefixTree::drop_unfindable(Node* node) {
  Node* top = nullptr;
  for (; !node->is_root(); node = node->parent) {
    if (node->on_host() && !node->parent->backed()) top = node->parent;
  }
  if (top != nullptr) drop_host_below(top);
}

// What goes first was used longest ago, so it is in no cache. Fetched one after the other, nodes and their
// lists would cost a memory access each; here they come at the same time.
void PrefixTree::prefetch_victims(const EvictionOrder& order) const {
  std::array<NodeId, kVictimsAtOnce> ids;
  const std::size_t n = order.next(ids);
  for (std::size_t i = 0; i < n; ++i) {
    const auto* lines = reinterpret_cast<const char*>(storage_->at(Storage::slot_of(ids[i])));
    for (std::size_t at = 0; at < sizeof(Node); at += kCacheLine) __builtin_prefetch(lines + at);
  }
  for (std::size_t i = 0; i < n; ++i) {
    const Node& node = *storage_->at(Storage::slot_of(ids[i]));
    __builtin_prefetch(node.hashes.data());
    __builtin_prefetch(node.device.data());
    __builtin_prefetch(node.host.data());
    __builtin_prefetch(node.previous_sibling);
    __builtin_prefetch(node.next_sibling);
  }
  for (std::size_t i = 0; i < n; ++i) {
    storage_->first_pages.prefetch(storage_->at(Storage::slot_of(ids[i]))->hashes.front());
  }
}

std::uint64_t PrefixTree::evict(std::uint64_t tokens) {
  std::uint64_t freed = 0;
  for (;;) {
    std::vector<NodeId> written;
    std::uint64_t on_the_way = 0;
    for (std::size_t i = 0; freed + on_the_way < tokens; ++i) {
      if (i % kVictimsAtOnce == 0) prefetch_victims(device_order_);
      const NodeId id = device_order_.first();
      if (id < 0) break;
      Node* node = find(id);
      const std::uint64_t size = tokens_of(*node);
      if (node->on_host()) {
        demote(node);
        freed += size;
      } else if (options_.write_policy == WritePolicy::write_back && write_backup(node, true)) {
        written.push_back(id);
        on_the_way += size;
      } else {
        remove(node);
        freed += size;
      }
    }
    if (written.empty()) return freed;
    if (const auto acks = tier_.finish_writes()) apply(*acks);
    for (const NodeId id : written) {
      Node* node = find(id);
      if (node == nullptr || !node->on_device()) continue;
      // Without an answer nobody may touch the device copy: it stays.
      if (node->write_of != kNoOperation) return freed;
      freed += tokens_of(*node);
      if (node->on_host()) {
        demote(node);
      } else {
        remove(node);
      }
    }
  }
}

std::uint64_t PrefixTree::evict_host(std::uint64_t tokens) {
  std::uint64_t freed = 0;
  for (std::size_t i = 0; freed < tokens; ++i) {
    if (i % kVictimsAtOnce == 0) prefetch_victims(host_order_);
    const NodeId id = host_order_.first();
    if (id < 0) break;
    Node* node = find(id);
    // The last one only as far as needed, from its tail: its front stays a prefix.
    const std::uint64_t pages = (tokens - freed + options_.page_tokens - 1) / options_.page_tokens;
    if (pages < node->hashes.size()) split(node, node->hashes.size() - pages);
    freed += tokens_of(*node);
    remove(node);
  }
  return freed;
}

void PrefixTree::apply(const std::vector<HiCacheAck>& acks) {
  for (const HiCacheAck& ack : acks) apply(ack);
}

void PrefixTree::apply(const HiCacheAck& ack) {
  for (const NodeId id : ack.node_ids) {
    if (ack.kind == OperationKind::write && writing_.contains(id)) end_write(ack, id);
    if (ack.kind == OperationKind::load && loading_.contains(id)) end_load(ack, id);
  }
}

void PrefixTree::end_write(const HiCacheAck& ack, NodeId id) {
  const bool write_back = writing_.at(id);
  writing_.erase(id);
  // Splits since then have cut the written run in several nodes, the first ones above.
  std::vector<Node*> parts;
  for (Node* node = find(id); node != nullptr && node->write_of == id; node = node->parent) {
    parts.push_back(node);
  }
  std::uint64_t end = 0;
  Node* lost = nullptr;
  for (auto at = parts.rbegin(); at != parts.rend(); ++at) {
    Node* node = *at;
    end += tokens_of(*node);
    node->write_of = kNoOperation;
    if (end > ack.host_tokens || !node->parent->backed()) {
      static_cast<void>(tier_.evict_host(take_host(node)));
      if (lost == nullptr) lost = node;
    }
    refresh(node);
  }
  if (!write_back) change_locks(find(id), -1);
  if (lost != nullptr) drop_host_below(lost);
}

}  // namespace hicache
