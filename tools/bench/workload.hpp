// The requests of a run as prefix-hash chains, hashed once before the clock starts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "shm/types.hpp"
#include "tools/bench/trace_reader.hpp"

namespace hicache::bench {

class Workload {
 public:
  // Block b stands for `page_tokens` tokens that are all b; the keys are the real hash chain over these
  // tokens.
  static Workload from_blocks(const BlockRequests& requests, std::uint32_t page_tokens);

  [[nodiscard]] std::size_t size() const { return offsets_.size() - 1; }
  [[nodiscard]] std::span<const PrefixHash> keys(std::size_t request) const {
    return std::span(keys_).subspan(offsets_[request], offsets_[request + 1] - offsets_[request]);
  }
  [[nodiscard]] std::uint64_t pages() const { return keys_.size(); }
  [[nodiscard]] std::uint64_t distinct_pages() const { return distinct_; }
  [[nodiscard]] std::uint32_t longest() const { return longest_; }

 private:
  std::vector<PrefixHash> keys_;
  std::vector<std::size_t> offsets_{0};
  std::uint64_t distinct_ = 0;
  std::uint32_t longest_ = 0;
};

}  // namespace hicache::bench
