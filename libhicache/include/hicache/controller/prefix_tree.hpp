// The prefix tree of an engine: which pages of which prefixes are on the device and, as far as this engine
// knows, on the host. It decides what is written, evicted and loaded back.
//
// A key is the hash chain of a token sequence (shm/prefix_hash.hpp): a page's hash stands for the page and
// everything before it, so pages match exactly when their hashes do. Lengths and slots count tokens, always
// whole pages.
//
// One tree lives in every rank's scheduler. The trees stay equal because they see the same calls and because
// every answer of the tier below is the group's (docs/controller.md).
//
// Thread safety: none; it belongs to the scheduler's thread. Blocking: only where the tier blocks (write_back
// eviction, load_back). Errors: values; a call that fails has changed nothing, unless it says so.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "hicache/controller/eviction_order.hpp"
#include "hicache/controller/tree_tier.hpp"
#include "hicache/export.h"

namespace hicache {

enum class WritePolicy : std::uint8_t { write_through, write_through_selective, write_back };
// invalid_argument "Invalid write policy: X" for any other text.
HICACHE_EXPORT Result<WritePolicy> parse_write_policy(std::string_view name);

struct PrefixTreeOptions {
  std::uint32_t page_tokens = 64;
  WritePolicy write_policy = WritePolicy::write_through;
  std::uint32_t selective_threshold = 2;   // hits before write_through_selective writes
  std::uint32_t load_back_threshold = 10;  // tokens below which a load is not worth its latency
  TreePolicy eviction = TreePolicy::lru;
  std::uint64_t pinnable_tokens = 0;  // what pin() may hold at most; 0 = nothing
  std::size_t ghosts = 65536;         // nodes that scan_resistant remembers after they left
};

// A node as callers see it: never valid again after the node was removed.
using NodeId = std::int64_t;

struct PrefixMatch {
  std::vector<std::uint64_t> device_slots;  // of the leading tokens that are on the device
  NodeId device_node = 0;                   // last of them; the root when there is none
  NodeId host_node = 0;                     // deepest node on the path that is on the host (the root counts)
  std::uint64_t host_tokens = 0;            // tokens behind the device's that the host should have
};

struct PrefixInsert {
  NodeId node = 0;                        // the last one of the prefix
  std::uint64_t matched_tokens = 0;       // were in the tree, on the device or not
  std::vector<std::uint64_t> duplicates;  // given slots that the tree does not keep: the caller's to free
};

struct LoadBack {
  NodeId node = 0;  // end of the loaded chain; locked until its ack
  std::vector<std::uint64_t> device_slots;
};

// What a node looks like, for tests and for people.
struct NodeView {
  NodeId id = 0;
  NodeId parent = 0;
  std::vector<PrefixHash> hashes;
  std::vector<std::uint64_t> device_slots;  // empty = evicted
  std::vector<std::uint64_t> host_slots;    // empty = not on the host
  std::uint32_t locks = 0;
  std::uint32_t host_locks = 0;
  std::uint32_t hits = 0;
  bool writing = false;
  bool pinned = false;
  std::size_t children = 0;
};

class HICACHE_EXPORT PrefixTree {
 public:
  static constexpr NodeId kRoot = 0;

  // The tier must outlive the tree.
  PrefixTree(const PrefixTreeOptions& options, TreeTier& tier);
  ~PrefixTree();
  PrefixTree(const PrefixTree&) = delete;
  PrefixTree& operator=(const PrefixTree&) = delete;

  // The longest known prefix. Splits a node where the prefix ends inside it.
  PrefixMatch match(std::span<const PrefixHash> hashes);
  // Adds a prefix whose KV data lies in device_slots (all tokens of all pages). Nodes that were evicted are
  // on the device again with the slots given. `chunked`: not the end of a request, counts as no use.
  Result<PrefixInsert> insert(std::span<const PrefixHash> hashes, std::span<const std::uint64_t> device_slots,
                              bool chunked = false);

  // A locked node and its ancestors stay on the device. not_found for a node that is gone.
  Outcome lock(NodeId node);
  Outcome unlock(NodeId node);
  // The same for the host copy of one node.
  Outcome lock_host(NodeId node);
  Outcome unlock_host(NodeId node);

  // Frees at least `tokens` on the device if it can, whole nodes; tokens freed. With write_back what is not
  // on the host is written first, and waited for.
  std::uint64_t evict(std::uint64_t tokens);
  // Gives up at least `tokens` of host handles if it can, from the tails of prefixes; tokens given up.
  std::uint64_t evict_host(std::uint64_t tokens);

  // Starts to load what the host has of the path to `node`. not_found when that is nothing or too little,
  // too_large when it is more than quota, no_space when the device has no room.
  Result<LoadBack> load_back(NodeId node, std::uint64_t quota);
  // Adds what the pool has of this prefix beyond what the tree knows: pages of other engines, of an earlier
  // life of this one, or fetched from storage. Tokens added; load_back can load them. All ranks call it
  // alike.
  Result<std::uint64_t> adopt(std::span<const PrefixHash> hashes);
  // Takes note of what ended.
  void apply(const HiCacheAck& ack);
  void apply(const std::vector<HiCacheAck>& acks);

  // Keeps a prefix on both tiers until `until` (a clock of the caller's that is the same on all ranks).
  // not_found when it is not in the tree, no_space beyond pinnable_tokens. A second pin may only extend.
  Outcome pin(std::span<const PrefixHash> hashes, std::uint64_t until);
  // Ends the pins whose time has come.
  void expire_pins(std::uint64_t now);

  // Forgets everything, or what one tier holds. The slots are not freed: the caller clears its pools. Nothing
  // may be in flight. The locks of a tier end with what it holds.
  void reset(ResetTiers tiers = ResetTiers::both);

  [[nodiscard]] Result<NodeView> view(NodeId node) const;
  [[nodiscard]] std::size_t nodes() const;
  [[nodiscard]] std::uint64_t evictable_tokens() const { return device_order_.tokens(); }
  [[nodiscard]] std::uint64_t device_tokens() const { return device_tokens_; }
  [[nodiscard]] std::uint64_t host_tokens() const { return host_tokens_; }
  [[nodiscard]] std::uint64_t pinned_tokens() const { return pinned_tokens_; }
  [[nodiscard]] std::size_t writing() const { return writing_.size(); }
  [[nodiscard]] std::size_t loading() const { return loading_.size(); }
  // Ids of all nodes but the root, in ascending order.
  [[nodiscard]] std::vector<NodeId> ids() const;
  // Empty, or the first thing that is wrong with the tree's own books.
  [[nodiscard]] std::string check() const;

 private:
  struct Node;
  struct Storage;

  // prefix_tree.cpp
  Node* find(NodeId id) const;
  Node* child_at(Node* parent, const PrefixHash& first) const;
  static std::size_t pages_in_common(const Node& node, std::span<const PrefixHash> hashes);
  Node* add_node(Node* parent, std::span<const PrefixHash> hashes);
  Node* split(Node* node, std::size_t pages);
  void unlink(Node* node);
  void touch(Node* node);
  std::uint64_t tokens_of(const Node& node) const;
  void refresh(Node* node);
  void refresh_in(EvictionOrder& order, EvictionOrder::Place& place, Node* node, bool wanted);
  void leave_orders(Node* node);
  void count_use(Node* node, bool chunked);
  [[nodiscard]] bool remembers_ghosts() const { return options_.eviction == TreePolicy::scan_resistant; }
  std::vector<PrefixHash> chain_of(const Node* node) const;
  void set_device(Node* node, std::vector<std::uint64_t> slots);
  std::vector<std::uint64_t> take_device(Node* node);
  void set_host(Node* node, std::vector<std::uint64_t> slots);
  std::vector<std::uint64_t> take_host(Node* node);
  void change_locks(Node* node, int by);

  // prefix_tree_write.cpp
  bool write_backup(Node* node, bool write_back);
  void demote(Node* node);
  void remove(Node* node);
  void drop_host_below(Node* node);
  void drop_unfindable(Node* node);
  void end_write(const HiCacheAck& ack, NodeId id);
  void prefetch_victims(const EvictionOrder& order) const;

  // prefix_tree_load.cpp
  void end_load(const HiCacheAck& ack, NodeId id);
  void give_up_device(Node* node);
  void forget(Node* node, ResetTiers tier);
  static bool held_for_a_load(const Node& node);
  std::vector<Node*> leading_part(std::vector<Node*> chain, std::size_t pages);

  PrefixTreeOptions options_;
  TreeTier& tier_;
  std::unique_ptr<Storage> storage_;
  EvictionOrder device_order_;  // on the device, nothing of it below, not locked, not pinned
  EvictionOrder host_order_;    // on the host only, nothing below, not locked, not pinned
  GhostList ghosts_;
  std::unordered_map<NodeId, bool> writing_;  // node -> its device copy waits to be evicted (write_back)
  std::unordered_map<NodeId, bool> loading_;
  std::vector<NodeId> pinned_;
  std::uint64_t device_tokens_ = 0;
  std::uint64_t host_tokens_ = 0;
  std::uint64_t pinned_tokens_ = 0;
  std::uint64_t clock_ = 0;
  Node* root_ = nullptr;
};

}  // namespace hicache
