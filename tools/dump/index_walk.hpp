// One bounded walk over all hash chains of a snapshot; the checks, the histogram and --index share it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "shm/region.hpp"

namespace hicache::inspect {

enum class ChainEnd : std::uint8_t {
  whole,         // ended with "none"
  out_of_range,  // a link leads outside the page table
  cycle,         // a link leads back into the same chain
  shared,        // a link leads into another bucket's chain
};

// Visits every page at most once, whatever the links say: at most buckets + pages steps.
class IndexWalk {
 public:
  IndexWalk() = default;
  explicit IndexWalk(const ConstTables& tables);

  struct Chain {
    std::uint32_t first = 0;           // into ids
    std::uint32_t length = 0;          // pages that no earlier chain holds
    std::uint32_t bad_link = kNone32;  // the link that ended it, unless whole
    ChainEnd end = ChainEnd::whole;
  };

  [[nodiscard]] const std::vector<Chain>& chains() const { return chains_; }
  [[nodiscard]] std::span<const std::uint32_t> pages_of(const Chain& chain) const {
    return std::span(ids_).subspan(chain.first, chain.length);
  }
  // Bucket whose chain holds the page, or kNone32.
  [[nodiscard]] std::uint32_t bucket_of(std::uint32_t page) const { return owner_[page]; }
  [[nodiscard]] std::uint64_t reachable() const { return ids_.size(); }

 private:
  std::vector<Chain> chains_;
  std::vector<std::uint32_t> ids_;
  std::vector<std::uint32_t> owner_;
};

}  // namespace hicache::inspect
