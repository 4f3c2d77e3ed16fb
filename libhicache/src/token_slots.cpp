#include "hicache/token_slots.hpp"

#include <string>

namespace hicache {

Result<std::unique_ptr<TokenSlots>> TokenSlots::create(std::uint64_t slots, std::uint32_t page_tokens) {
  if (page_tokens == 0 || slots == 0 || slots % page_tokens != 0) {
    return Error{Status::invalid_argument,
                 "pool of " + std::to_string(slots) +
                     " token slots, expected a positive multiple of the page size " +
                     std::to_string(page_tokens),
                 0};
  }
  return std::unique_ptr<TokenSlots>(new TokenSlots(slots / page_tokens, page_tokens));
}

TokenSlots::TokenSlots(std::uint64_t pages, std::uint32_t page_tokens)
    : page_tokens_(page_tokens), pages_(pages), free_(pages) {
  fill();
}

void TokenSlots::fill() {
  for (std::uint64_t page = 0; page < pages_.size(); ++page) {
    pages_[page] = page;
    free_[page] = true;
  }
  first_ = 0;
  count_ = pages_.size();
}

void TokenSlots::append_slots(std::uint64_t page, std::vector<std::uint64_t>& out) const {
  for (std::uint32_t i = 0; i < page_tokens_; ++i) out.push_back(page * page_tokens_ + i);
}

Result<std::vector<std::uint64_t>> TokenSlots::alloc(std::uint64_t n) {
  if (n % page_tokens_ != 0) {
    return Error{Status::invalid_argument,
                 "The requested size should be a multiple of the page size. Requested " + std::to_string(n) +
                     " slots, the page size is " + std::to_string(page_tokens_),
                 0};
  }
  const std::lock_guard lock(mutex_);
  const std::uint64_t pages = n / page_tokens_;
  if (pages > count_) {
    return Error{Status::no_space,
                 "requested " + std::to_string(n) + " token slots, " + std::to_string(count_ * page_tokens_) +
                     " are free",
                 0};
  }
  std::vector<std::uint64_t> out;
  out.reserve(n);
  for (std::uint64_t i = 0; i < pages; ++i) {
    const std::uint64_t page = pages_[first_];
    first_ = first_ + 1 == pages_.size() ? 0 : first_ + 1;
    free_[page] = false;
    append_slots(page, out);
  }
  count_ -= pages;
  return out;
}

Outcome TokenSlots::free(std::span<const std::uint64_t> slots) {
  if (slots.size() % page_tokens_ != 0) {
    return Error{Status::invalid_argument,
                 "freeing " + std::to_string(slots.size()) + " token slots, expected whole pages of " +
                     std::to_string(page_tokens_),
                 0};
  }
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const std::uint64_t in_page = i % page_tokens_;
    const std::uint64_t expected =
        in_page == 0 ? slots[i] - slots[i] % page_tokens_ : slots[i - in_page] + in_page;
    if (slots[i] >= size() || slots[i] != expected) {
      return Error{Status::invalid_argument,
                   "token slot " + std::to_string(slots[i]) + " at position " + std::to_string(i) +
                       ", expected whole pages of " + std::to_string(page_tokens_) +
                       " ascending slots below " + std::to_string(size()),
                   0};
    }
  }
  std::size_t marked = 0;
  for (; marked < slots.size(); marked += page_tokens_) {
    const std::uint64_t page = slots[marked] / page_tokens_;
    if (free_[page]) break;
    free_[page] = true;
  }
  if (marked < slots.size()) {
    const std::uint64_t culprit = slots[marked];
    for (std::size_t i = 0; i < marked; i += page_tokens_) free_[slots[i] / page_tokens_] = false;
    return Error{Status::already_released, "token slot " + std::to_string(culprit) + " is free already", 0};
  }
  for (std::size_t i = 0; i < slots.size(); i += page_tokens_) {
    pages_[(first_ + count_) % pages_.size()] = slots[i] / page_tokens_;
    ++count_;
  }
  return success();
}

void TokenSlots::clear() {
  const std::lock_guard lock(mutex_);
  fill();
}

std::uint64_t TokenSlots::available() const {
  const std::lock_guard lock(mutex_);
  return count_ * page_tokens_;
}

std::vector<std::uint64_t> TokenSlots::free_list() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::uint64_t> out;
  out.reserve(count_ * page_tokens_);
  for (std::uint64_t i = 0; i < count_; ++i) append_slots(pages_[(first_ + i) % pages_.size()], out);
  return out;
}

}  // namespace hicache
