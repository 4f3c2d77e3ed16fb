// Where the nodes of a prefix tree lie, for the files that implement it: side by side in blocks, found by
// number without a search, and a flat table that says which node begins with which page. A tree of many
// leaves is larger than the processor's caches, so what a look-up costs is how many lines it touches.
#pragma once

#include <bit>
#include <memory>
#include <vector>

#include "prefix_tree_node.hpp"

namespace hicache {

// Which node begins with which page. Linear probing over 8 bytes an entry, at most half full; an entry's
// home is its tag, so that nothing but the table is touched to move or erase one.
class FirstPages {
 public:
  FirstPages() { clear(); }

  void clear() {
    entries_.assign(kLeast, {});
    count_ = 0;
  }
  void insert(const PrefixHash& hash, std::uint32_t slot) {
    if (2 * (count_ + 1) > entries_.size()) grow();
    place({tag(hash), slot + 1});
    ++count_;
  }
  // Precondition: the entry is there.
  void replace(const PrefixHash& hash, std::uint32_t slot, std::uint32_t by) {
    entries_[position(hash, slot)].slot = by + 1;
  }
  void erase(const PrefixHash& hash, std::uint32_t slot) {
    std::size_t hole = position(hash, slot);
    for (std::size_t i = next(hole); entries_[i].slot != 0; i = next(i)) {
      // Whatever is as far from its home as the hole is, or farther, may fill it.
      const std::size_t distance = (i - entries_[i].tag) & mask();
      if (distance < ((i - hole) & mask())) continue;
      entries_[hole] = entries_[i];
      hole = i;
    }
    entries_[hole] = {};
    --count_;
  }
  // The slot for which `is_it` holds among those whose tag fits; -1 when there is none.
  template <class IsIt>
  [[nodiscard]] std::int64_t find(const PrefixHash& hash, IsIt&& is_it) const {
    for (std::size_t i = tag(hash) & mask(); entries_[i].slot != 0; i = next(i)) {
      if (entries_[i].tag == tag(hash) && is_it(entries_[i].slot - 1)) return entries_[i].slot - 1;
    }
    return -1;
  }
  void prefetch(const PrefixHash& hash) const { __builtin_prefetch(&entries_[tag(hash) & mask()]); }

 private:
  static constexpr std::size_t kLeast = 64;
  struct Entry {
    std::uint32_t tag = 0;
    std::uint32_t slot = 0;  // and 1; 0 = empty
  };
  static std::uint32_t tag(const PrefixHash& hash) { return static_cast<std::uint32_t>(hash.words[0]); }
  [[nodiscard]] std::size_t mask() const { return entries_.size() - 1; }
  [[nodiscard]] std::size_t next(std::size_t i) const { return (i + 1) & mask(); }
  [[nodiscard]] std::size_t position(const PrefixHash& hash, std::uint32_t slot) const {
    std::size_t i = tag(hash) & mask();
    while (entries_[i].slot != slot + 1) i = next(i);
    return i;
  }
  void place(Entry entry) {
    std::size_t i = entry.tag & mask();
    while (entries_[i].slot != 0) i = next(i);
    entries_[i] = entry;
  }
  void grow() {
    auto old = std::exchange(entries_, std::vector<Entry>(2 * entries_.size()));
    for (const Entry& entry : old) {
      if (entry.slot != 0) place(entry);
    }
  }

  std::vector<Entry> entries_;
  std::size_t count_ = 0;
};

// A node's id is the slot it lies in, and above that how often the slot was used before: an id that was given
// out never stands for another node.
struct PrefixTree::Storage {
  Node* add() {
    std::uint32_t slot = 0;
    if (free.empty()) {
      slot = static_cast<std::uint32_t>(uses.size());
      if (slot % kBlock == 0) blocks.push_back(std::make_unique<Node[]>(kBlock));
      uses.push_back(0);
    } else {
      slot = free.back();
      free.pop_back();
    }
    Node* node = at(slot);
    node->id = static_cast<NodeId>((std::uint64_t{uses[slot]} << 32) | slot);
    ++count;
    return node;
  }
  void remove(Node* node) {
    const std::uint32_t slot = slot_of(node->id);
    *node = Node{};
    uses[slot] = (uses[slot] + 1) & 0x7fffffffu;  // ids stay positive
    free.push_back(slot);
    --count;
  }
  [[nodiscard]] Node* find(NodeId id) const {
    if (id < 0 || slot_of(id) >= uses.size()) return nullptr;
    Node* node = at(slot_of(id));
    return node->id == id ? node : nullptr;
  }
  [[nodiscard]] Node* at(std::uint32_t slot) const { return &blocks[slot / kBlock][slot % kBlock]; }
  static std::uint32_t slot_of(NodeId id) { return static_cast<std::uint32_t>(id); }
  template <class Visit>
  void for_each(Visit&& visit) const {
    for (std::uint32_t slot = 0; slot < uses.size(); ++slot) {
      if (at(slot)->id != kNoOperation) visit(*at(slot));
    }
  }

  static constexpr std::uint32_t kBlock = 64;
  std::vector<std::unique_ptr<Node[]>> blocks;
  std::vector<std::uint32_t> uses;  // by slot
  std::vector<std::uint32_t> free;  // used last first: still in the cache
  std::size_t count = 0;
  FirstPages first_pages;
};

}  // namespace hicache
