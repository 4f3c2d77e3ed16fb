// Single-producer single-consumer ring of 64-byte entries in shared memory.
//
// Thread safety: exactly one producer thread and one consumer thread at a time, in any two processes.
// Positions are free-running 32-bit counters; entry n lives in slot n mod size and carries sequence n + 1.
//
// Invariants
//   1. The producer writes slot n only after the consumer's head has passed n - size (`space` says so).
//   2. A consumer reads a payload only after it saw sequence n + 1, and advances head only after it copied
//   it.
//   3. Neither side believes the other: a head or sequence that can't be true is reported, never used as an
//   index.
//
// SYNC ring-publish:  producer `sequence` store (release)  ->  consumer `sequence` load (acquire).
//   Weaker: the consumer could copy a payload whose stores have not arrived.
// SYNC ring-free:     consumer `head` store (release)      ->  producer `head` load (acquire).
//   Weaker: the producer could overwrite a payload that the consumer is still copying.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>

#include "shm/channel_layout.hpp"

namespace hicache {

template <class Payload>
class RingProducer {
  static_assert(sizeof(Payload) == 56 && std::is_trivially_copyable_v<Payload>);

 public:
  RingProducer() = default;
  // `head` is the consumer's word, `tail` ours. Starts at the position that `tail` holds now.
  RingProducer(RingEntry* entries, std::uint32_t size, const A32* head, A32* tail)
      : entries_(entries),
        mask_(size - 1),
        head_(head),
        tail_word_(tail),
        tail_(tail->load(std::memory_order_relaxed)),
        head_seen_(tail_) {}

  // Free slots. A head that claims more than was produced counts as no space and is reported by `broken`.
  [[nodiscard]] std::uint32_t space() {
    head_seen_ = head_->load(std::memory_order_acquire);  // SYNC ring-free
    const std::uint32_t used = tail_ - head_seen_;
    return used > mask_ + 1 ? 0 : mask_ + 1 - used;
  }
  // True when the consumer's head can't be true: it is ahead of the tail or more than a ring behind.
  [[nodiscard]] bool broken() const { return tail_ - head_seen_ > mask_ + 1; }
  // Like space() but only looks at the shared word when the last known head leaves no room.
  [[nodiscard]] bool has_space() {
    if (tail_ - head_seen_ <= mask_) return true;
    return space() > 0;
  }
  // Precondition: has_space(). Publishes one entry.
  void push(const Payload& payload) {
    RingEntry& entry = entries_[tail_ & mask_];
    std::array<std::uint64_t, 7> words;
    std::memcpy(words.data(), &payload, sizeof payload);
    for (std::size_t i = 0; i < 7; ++i) entry.payload[i].store(words[i], std::memory_order_relaxed);
    ++tail_;
    entry.sequence.store(tail_, std::memory_order_release);  // SYNC ring-publish
    tail_word_->store(tail_, std::memory_order_relaxed);  // for dump and the sleeper's second look (wait.hpp)
  }
  [[nodiscard]] std::uint32_t tail() const { return tail_; }
  [[nodiscard]] std::uint32_t head_seen() const { return head_seen_; }

 private:
  RingEntry* entries_ = nullptr;
  std::uint32_t mask_ = 0;
  const A32* head_ = nullptr;
  A32* tail_word_ = nullptr;
  std::uint32_t tail_ = 0;
  std::uint32_t head_seen_ = 0;
};

template <class Payload>
class RingConsumer {
  static_assert(sizeof(Payload) == 56 && std::is_trivially_copyable_v<Payload>);

 public:
  RingConsumer() = default;
  RingConsumer(const RingEntry* entries, std::uint32_t size, A32* head)
      : entries_(entries), mask_(size - 1), head_word_(head), head_(head->load(std::memory_order_relaxed)) {}

  [[nodiscard]] bool ready() const {
    return entries_[head_ & mask_].sequence.load(std::memory_order_acquire) ==
           head_ + 1;  // SYNC ring-publish
  }
  // Copies the next entry out and frees its slot, or nothing. The copy is the only read of the payload.
  std::optional<Payload> pop() {
    if (!ready()) return std::nullopt;
    const RingEntry& entry = entries_[head_ & mask_];
    std::array<std::uint64_t, 7> words;
    for (std::size_t i = 0; i < 7; ++i) words[i] = entry.payload[i].load(std::memory_order_relaxed);
    Payload payload;
    std::memcpy(static_cast<void*>(&payload), words.data(), sizeof payload);
    ++head_;
    head_word_->store(head_, std::memory_order_release);  // SYNC ring-free
    return payload;
  }
  [[nodiscard]] std::uint32_t head() const { return head_; }

 private:
  const RingEntry* entries_ = nullptr;
  std::uint32_t mask_ = 0;
  A32* head_word_ = nullptr;
  std::uint32_t head_ = 0;
};

}  // namespace hicache
