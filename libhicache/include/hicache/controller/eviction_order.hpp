// Which node of a prefix tree goes first. No call costs more than O(log n) in the nodes that may go.
//
//   lru             least recently used first
//   lfu             least often used first, among equals the least recently used
//   scan_resistant  in the way of 2Q and S3-FIFO: what was used once goes first in, first out, and leaves
//                   before anything that was used again, unless that takes more than its share; what comes
//                   back soon after it left counts as used again. A long scan passes without touching the
//                   hot prefixes.
//
// Thread safety: none.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <deque>
#include <set>
#include <span>
#include <string_view>
#include <unordered_map>

#include "hicache/export.h"
#include "shm/status.hpp"
#include "shm/types.hpp"

namespace hicache {

enum class TreePolicy : std::uint8_t { lru, lfu, scan_resistant };
HICACHE_EXPORT Result<TreePolicy> parse_tree_policy(std::string_view name);

// How a node was used.
struct NodeUse {
  std::uint64_t last_use = 0;  // the tree's count of calls, not a clock: ranks must agree
  std::uint64_t created = 0;
  std::uint32_t uses = 0;
  bool returned = false;  // it came back soon after it had been evicted
};

class HICACHE_EXPORT EvictionOrder {
 public:
  // Of the evictable tokens, hot ones may take this much before they go first.
  static constexpr double kHotShare = 0.9;

  explicit EvictionOrder(TreePolicy policy) : policy_(policy) {}

 private:
  struct Key {
    std::uint64_t major = 0;
    std::uint64_t minor = 0;
    std::int64_t node = 0;
    friend constexpr auto operator<=>(const Key&, const Key&) = default;
  };

 public:
  // Where a node stands, or nowhere. The owner of the node keeps it.
  class Place {
   public:
    explicit operator bool() const { return tokens_ != 0; }

   private:
    friend class EvictionOrder;
    std::set<Key>::const_iterator at_;
    std::uint64_t tokens_ = 0;
    std::uint8_t set_ = 0;
  };

  // Puts a node where its use says, from the place where it stood. Nothing happens when that is the same
  // place. `tokens` > 0.
  void put(Place& place, std::int64_t node, const NodeUse& use, std::uint64_t tokens);
  // O(1) on the average: nothing is searched. Nothing happens when the node stands nowhere.
  void erase(Place& place);
  // The node that goes first; -1 when there is none.
  [[nodiscard]] std::int64_t first() const;
  // Nodes that will probably go next, so that somebody can fetch them into the cache; how many.
  std::size_t next(std::span<std::int64_t> out) const;
  [[nodiscard]] std::size_t size() const { return sets_[0].size() + sets_[1].size(); }
  [[nodiscard]] std::uint64_t tokens() const { return tokens_[0] + tokens_[1]; }
  // Every place becomes invalid.
  void clear();

 private:
  [[nodiscard]] std::size_t temperature(const NodeUse& use) const;
  [[nodiscard]] Key key(std::int64_t node, const NodeUse& use) const;
  [[nodiscard]] const std::set<Key>& first_set() const;

  TreePolicy policy_;
  std::array<std::set<Key>, 2> sets_;  // cold, hot; only scan_resistant has hot ones
  std::array<std::uint64_t, 2> tokens_{};
};

// Remembers the last pages that left, by the hash of a node's first page.
class HICACHE_EXPORT GhostList {
 public:
  explicit GhostList(std::size_t capacity) : capacity_(capacity) {}
  void add(const PrefixHash& hash);
  // True when it was there; it is taken out.
  bool take(const PrefixHash& hash);
  void clear();

 private:
  struct Hash {
    std::size_t operator()(const PrefixHash& h) const { return static_cast<std::size_t>(h.words[0]); }
  };
  std::size_t capacity_;
  std::uint64_t next_ = 0;
  std::deque<std::pair<PrefixHash, std::uint64_t>> order_;  // oldest first; stale where the stamp differs
  std::unordered_map<PrefixHash, std::uint64_t, Hash> stamps_;
};

}  // namespace hicache
