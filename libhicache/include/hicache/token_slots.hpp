// The host pool as SGLang's cache controller sees it: token slots, handed out in whole pages from a FIFO free
// list.
//
// It only keeps numbers: which slots an engine uses. The memory behind them is the daemon's, and its slot
// allocator works by other rules.
//
// Thread safety: every call takes an internal mutex. Blocking: none beyond that. Errors: values.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "hicache/export.h"
#include "shm/status.hpp"

namespace hicache {

class HICACHE_EXPORT TokenSlots {
 public:
  // A pool of `slots` token slots, a positive multiple of page_tokens, all free, in ascending order.
  // invalid_argument otherwise.
  static Result<std::unique_ptr<TokenSlots>> create(std::uint64_t slots, std::uint32_t page_tokens);

  // Takes the first n slots of the free list: all or none. n is a multiple of the page size, else
  // invalid_argument; no_space when fewer than n are free (nothing is taken then).
  Result<std::vector<std::uint64_t>> alloc(std::uint64_t n);

  // Appends whole pages to the end of the free list, in the order given. invalid_argument when the slots are
  // not whole pages of the pool, each in ascending order; already_released when one of them is free already
  // or is named twice. An error has no effect: nothing of the list is freed.
  Outcome free(std::span<const std::uint64_t> slots);

  // Frees everything: the free list is 0 ... slots-1 again.
  void clear();

  [[nodiscard]] std::uint64_t available() const;
  [[nodiscard]] std::uint64_t size() const { return pages_.size() * page_tokens_; }
  [[nodiscard]] std::uint32_t page_tokens() const { return page_tokens_; }
  // The free slots in the order in which alloc hands them out.
  [[nodiscard]] std::vector<std::uint64_t> free_list() const;

 private:
  TokenSlots(std::uint64_t pages, std::uint32_t page_tokens);
  void append_slots(std::uint64_t page, std::vector<std::uint64_t>& out) const;
  void fill();

  const std::uint32_t page_tokens_;
  mutable std::mutex mutex_;
  // The free list, a ring as large as the pool. Invariant: pages_[(first_ + i) mod size], i < count_, are
  // exactly the pages marked in free_, each once.
  std::vector<std::uint64_t> pages_;
  std::vector<bool> free_;
  std::uint64_t first_ = 0;
  std::uint64_t count_ = 0;
};

}  // namespace hicache
