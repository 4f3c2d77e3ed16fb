// A node of the prefix tree, for the files that implement it.
#pragma once

#include <algorithm>
#include <utility>

#include "hicache/controller/prefix_tree.hpp"

namespace hicache {

constexpr NodeId kNoOperation = -1;

struct PrefixTree::Node {
  NodeId id = kNoOperation;  // as long as there is no node here
  Node* parent = nullptr;
  Node* first_child = nullptr;
  Node* next_sibling = nullptr;
  Node* previous_sibling = nullptr;
  std::vector<PrefixHash> hashes;
  std::vector<std::uint64_t> device;  // empty = evicted
  std::vector<std::uint64_t> host;    // empty = not on the host
  NodeUse use;
  std::uint32_t hits = 0;
  std::uint32_t locks = 0;
  std::uint32_t host_locks = 0;
  std::uint32_t children = 0;
  std::uint32_t device_children = 0;  // those that are on the device
  NodeId write_of = kNoOperation;     // the write in flight that this is a part of, by the node it was for
  NodeId load_of = kNoOperation;      // the same of a load
  bool bad = false;                   // its load failed: the device slots hold nothing valid
  std::uint64_t pinned_until = 0;     // 0 = not pinned
  EvictionOrder::Place device_place;  // nowhere unless it may go
  EvictionOrder::Place host_place;

  [[nodiscard]] bool on_device() const { return !device.empty(); }
  [[nodiscard]] bool on_host() const { return !host.empty(); }
  [[nodiscard]] bool is_root() const { return parent == nullptr; }
  [[nodiscard]] bool backed() const { return is_root() || on_host(); }
};

}  // namespace hicache
