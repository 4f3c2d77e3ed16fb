// What other processes may find in a live daemon's tables, whenever they look: the invariants of
// shm/page_word.hpp and shm/prefix_index.hpp, checked in the middle of a commit.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "shm/page_seal.hpp"
#include "shm/prefix_index.hpp"
#include "tests/crash/stepping/recovery.hpp"

namespace hicache::test {

// Remembers the lives of pages from look to look, so one belongs to one daemon.
class ReaderView {
 public:
  // What is wrong now.
  std::vector<std::string> look(const Tables& t, const std::uint8_t* pool) {
    std::vector<std::string> faults;
    for (std::uint32_t i = 0; i < t.pages.size(); ++i) look_at_page(t, i, pool, faults);
    for (std::uint64_t bucket = 0; bucket < t.index.size(); ++bucket) follow(t, bucket, faults);
    return faults;
  }

 private:
  static std::string page(std::uint32_t i) { return "page " + std::to_string(i) + " "; }

  void look_at_page(const Tables& t, std::uint32_t i, const std::uint8_t* pool,
                    std::vector<std::string>& faults) {
    const PageEntry& p = t.pages[i];
    const PageWord word = PageWord::decode(p.word.load());
    if (word.state == PageState::free || word.state == PageState::reserved) return;
    // Late messages about a page are told from those about its next life by the generation alone.
    const auto [life, first] = lives_.emplace(std::pair(i, word.generation.value), load_key(p).words);
    if (!first && life->second != load_key(p).words)
      faults.push_back(page(i) + "has another key than before in the same generation");
    if (!word.readable()) return;
    const std::uint32_t shards = t.namespaces[p.namespace_id.load()].shards.load();
    if (p.shards_done.load() != (1ull << shards) - 1)
      faults.push_back(page(i) + "is ready without all its shards");
    if (p.seal.load() != page_seal(p)) faults.push_back(page(i) + "is ready without its seal");
    if (const std::uint32_t up = p.parent.load(); up != kNone32) {
      const PageWord parent = PageWord::decode(t.pages[up].word.load());
      if (!parent.readable() || parent.generation.value != p.parent_generation.load())
        faults.push_back(page(i) + "is ready, its parent is not");
    }
    check_bytes(t, i, pool, faults);
  }

  static void follow(const Tables& t, std::uint64_t bucket, std::vector<std::string>& faults) {
    const std::uint64_t head = t.index[bucket].head.load();
    if ((head >> 32) % 2 != 0) return;  // it changes: a reader tries again
    const IndexWriter index(t, t.header->hash_seed.load());
    auto id = static_cast<std::uint32_t>(head);
    for (std::size_t steps = 0; id != kNone32; ++steps) {
      if (id >= t.pages.size() || steps > t.pages.size()) {
        faults.push_back("the chain of bucket " + std::to_string(bucket) + " leads nowhere");
        return;
      }
      const PageEntry& p = t.pages[id];
      const PageState state = PageWord::decode(p.word.load()).state;
      const bool belongs =
          state == PageState::filling || state == PageState::ready || state == PageState::evicting;
      if (!belongs || index.bucket_of(load_key(p), NamespaceId{p.namespace_id.load()}) != bucket)
        faults.push_back(page(id) + "is in the index before it is complete, or after its life");
      id = p.chain_next.load();
    }
  }

  std::map<std::pair<std::uint32_t, std::uint32_t>, std::array<std::uint64_t, 4>> lives_;  // page, generation
};

}  // namespace hicache::test
