// The hit query of a prefetch: how many leading pages storage has, asked in batches, and no further than the
// first batch that is not complete.
#pragma once

#include <algorithm>
#include <cstddef>

#include "daemon/storage/backend.hpp"

namespace hicache::daemon {

class LeadingHits {
 public:
  struct Batch {
    std::size_t first = 0;
    std::size_t count = 0;
  };

  LeadingHits() = default;
  explicit LeadingHits(std::size_t pages) : pages_(pages) {}

  // What to ask next; count 0 when there is nothing more to ask.
  [[nodiscard]] Batch next() const {
    return {hits_, done_ ? 0 : std::min<std::size_t>(pages_ - hits_, kStorageBatchPages)};
  }
  // `found` leading pages of next() are there.
  void answer(std::size_t found) {
    done_ = found < next().count;
    hits_ += found;
    done_ = done_ || hits_ == pages_;
  }
  [[nodiscard]] bool done() const { return next().count == 0; }
  [[nodiscard]] std::size_t hits() const { return hits_; }

 private:
  std::size_t pages_ = 0;
  std::size_t hits_ = 0;
  bool done_ = false;
};

}  // namespace hicache::daemon
