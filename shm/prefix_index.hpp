// The prefix index: hash chains of pages, readable by any process without the daemon and without locks.
//
// Thread safety: one writer (the coordinator); any number of readers in any process, through read-only
// mappings.
//
// Invariants
//   1. A bucket's version (high half of `head`) is odd exactly while its chain changes.
//   2. A page is in at most one chain, and in it exactly while its state is filling or ready.
//   3. A page's key, namespace and offset change only while it is in no chain.
//
// SYNC index-chain: the writer stores the odd version, fences (release), changes links, stores the even
// version
//   (release). A reader loads the version (acquire), walks, fences (acquire), and loads the version again;
//   equal and even means it saw one whole chain. Weaker: it could follow a half-made link and call a present
//   page absent.
// SYNC page-word: the writer stores the page word (release) after the key and the shards' bytes; a reader
// loads it
//   (acquire), reads the key, fences (acquire) and loads it again. Weaker: a reader could match a key of the
//   page's previous life. The answer of a lookup is a hint all the same: `reserve` decides.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <span>

#include "shm/page_word.hpp"
#include "shm/region.hpp"

namespace hicache {

inline std::uint64_t index_hash(const PrefixHash& hash, NamespaceId ns, std::uint64_t seed) {
  // The hash is a SHA-256 digest already; the seed keeps a hostile client from choosing its bucket.
  std::uint64_t x = (hash.words[0] ^ seed) + 0x9e3779b97f4a7c15ull * (std::uint64_t{ns.value} + 1);
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93ull;
  x ^= x >> 32;
  return x;
}

inline PrefixHash load_key(const PageEntry& page) {
  PrefixHash h;
  for (std::size_t i = 0; i < 4; ++i) h.words[i] = page.key[i].load(std::memory_order_relaxed);
  return h;
}

// Result of a lookup without the daemon.
struct ProbeResult {
  std::uint32_t leading = 0;  // leading pages that were ready when looked at
  bool busy = false;          // gave up on a bucket that kept changing: treat the rest as absent
};

class IndexReader {
 public:
  IndexReader() = default;
  explicit IndexReader(const ConstTables& tables, std::uint64_t seed)
      : buckets_(tables.index), pages_(tables.pages), seed_(seed), mask_(tables.index.size() - 1) {}

  // How many leading hashes are present and ready; with `states` only as far as the last one that carries
  // states. No system call, no store. Cost: about two cache misses a page, overlapped by prefetching kBatch
  // pages ahead.
  [[nodiscard]] ProbeResult probe(std::span<const PrefixHash> hashes, NamespaceId ns,
                                  bool states = false) const {
    ProbeResult result;
    std::uint32_t leading = 0;
    for (std::size_t base = 0; base < hashes.size(); base += kBatch) {
      const std::size_t n = std::min(kBatch, hashes.size() - base);
      std::array<std::uint64_t, kBatch> bucket;
      for (std::size_t i = 0; i < n; ++i) {
        bucket[i] = index_hash(hashes[base + i], ns, seed_) & mask_;
        __builtin_prefetch(&buckets_[bucket[i]]);
      }
      for (std::size_t i = 0; i < n; ++i) {
        const auto first =
            static_cast<std::uint32_t>(buckets_[bucket[i]].head.load(std::memory_order_relaxed));
        if (first < pages_.size()) __builtin_prefetch(&pages_[first]);
      }
      for (std::size_t i = 0; i < n; ++i) {
        switch (find(hashes[base + i], ns, bucket[i])) {
          case Found::yes:
            ++leading;
            if (!states) result.leading = leading;
            break;
          case Found::with_states:
            result.leading = ++leading;
            break;
          case Found::no:
            return result;
          case Found::busy:
            result.busy = true;
            return result;
        }
      }
    }
    return result;
  }

 private:
  static constexpr std::size_t kBatch = 32;
  static constexpr int kRetries = 16;
  static constexpr int kMaxSteps = 4096;  // a longer chain is damage, not load
  enum class Found { yes, with_states, no, busy };

  [[nodiscard]] Found find(const PrefixHash& hash, NamespaceId ns, std::uint64_t bucket) const {
    for (int attempt = 0; attempt < kRetries; ++attempt) {
      const std::uint64_t head = buckets_[bucket].head.load(std::memory_order_acquire);  // SYNC index-chain
      if ((head >> 32) & 1) continue;
      Found found = Found::no;
      auto id = static_cast<std::uint32_t>(head);
      int steps = 0;
      while (id != kNone32 && id < pages_.size() && steps++ < kMaxSteps) {
        const PageEntry& page = pages_[id];
        const std::uint64_t word = page.word.load(std::memory_order_acquire);  // SYNC page-word
        if (page.namespace_id.load(std::memory_order_relaxed) == ns.value && load_key(page) == hash) {
          std::atomic_thread_fence(std::memory_order_acquire);  // SYNC page-word
          const PageWord now = PageWord::decode(page.word.load(std::memory_order_relaxed));
          const PageWord before = PageWord::decode(word);
          if (now.generation == before.generation && before.readable() && now.readable()) {
            return (now.flags & PageWord::kStates) != 0 ? Found::with_states : Found::yes;
          }
          break;  // right key but not ready, or it changed under us: the version decides whether to look
                  // again
        }
        id = page.chain_next.load(std::memory_order_relaxed);
      }
      std::atomic_thread_fence(std::memory_order_acquire);  // SYNC index-chain
      if (buckets_[bucket].head.load(std::memory_order_relaxed) == head) return found;
    }
    return Found::busy;
  }

  std::span<const IndexBucket> buckets_;
  std::span<const PageEntry> pages_;
  std::uint64_t seed_ = 0;
  std::uint64_t mask_ = 0;
};

// The coordinator's side. Every call must come from the one writer thread.
class IndexWriter {
 public:
  IndexWriter() = default;
  explicit IndexWriter(const Tables& tables, std::uint64_t seed)
      : buckets_(tables.index), pages_(tables.pages), seed_(seed), mask_(tables.index.size() - 1) {}

  [[nodiscard]] std::uint64_t bucket_of(const PrefixHash& hash, NamespaceId ns) const {
    return index_hash(hash, ns, seed_) & mask_;
  }
  void prefetch_bucket(std::uint64_t bucket) const { __builtin_prefetch(&buckets_[bucket]); }
  void prefetch_page(std::uint64_t bucket) const {
    const auto first = static_cast<std::uint32_t>(buckets_[bucket].head.load(std::memory_order_relaxed));
    if (first != kNone32) __builtin_prefetch(&pages_[first]);
  }

  // The page with this key, filling or ready, or none.
  [[nodiscard]] PageId find(const PrefixHash& hash, NamespaceId ns, std::uint64_t bucket) const {
    auto id = static_cast<std::uint32_t>(buckets_[bucket].head.load(std::memory_order_relaxed));
    while (id != kNone32) {
      const PageEntry& page = pages_[id];
      if (page.namespace_id.load(std::memory_order_relaxed) == ns.value && load_key(page) == hash)
        return PageId{id};
      id = page.chain_next.load(std::memory_order_relaxed);
    }
    return PageId::none();
  }

  // Precondition: the page is in no chain, its key and namespace are set.
  void insert(PageId page, std::uint64_t bucket) {
    change(bucket, [&](std::uint32_t first) {
      pages_[page.value].chain_next.store(first, std::memory_order_relaxed);
      return page.value;
    });
  }

  // Precondition: the page is in the chain of `bucket`. Returns false when it was not (damage or a bug).
  bool erase(PageId page, std::uint64_t bucket) {
    bool found = false;
    change(bucket, [&](std::uint32_t first) {
      const std::uint32_t next = pages_[page.value].chain_next.load(std::memory_order_relaxed);
      if (first == page.value) {
        found = true;
        pages_[page.value].chain_next.store(kNone32, std::memory_order_relaxed);
        return next;
      }
      for (std::uint32_t id = first; id != kNone32;) {
        A32& link = pages_[id].chain_next;
        id = link.load(std::memory_order_relaxed);
        if (id == page.value) {
          found = true;
          link.store(next, std::memory_order_relaxed);
          pages_[page.value].chain_next.store(kNone32, std::memory_order_relaxed);
          break;
        }
      }
      return first;
    });
    return found;
  }

 private:
  template <class Change>
  void change(std::uint64_t bucket, Change&& apply) {
    A64& word = buckets_[bucket].head;
    const std::uint64_t head = word.load(std::memory_order_relaxed);
    const std::uint64_t version = head >> 32;
    word.store(((version + 1) << 32) | (head & 0xffffffffu), std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);  // SYNC index-chain
    const std::uint32_t first = apply(static_cast<std::uint32_t>(head));
    word.store(((version + 2) << 32) | first, std::memory_order_release);  // SYNC index-chain
  }

  std::span<IndexBucket> buckets_;
  std::span<PageEntry> pages_;
  std::uint64_t seed_ = 0;
  std::uint64_t mask_ = 0;
};

}  // namespace hicache
