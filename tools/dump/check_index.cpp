#include <algorithm>
#include <array>
#include <tuple>
#include <vector>

#include "shm/page_word.hpp"
#include "shm/prefix_index.hpp"
#include "tools/dump/checker.hpp"

namespace hicache::inspect {
namespace {

PageWord word_of(const CheckContext& c, std::uint32_t page) {
  return PageWord::decode(get(c.t.pages[page].word));
}

FindingId page_id(const CheckContext& c, FindingKind kind, std::uint32_t page, std::int64_t difference = 0) {
  return {kind, SectionKind::pages, page, word_of(c, page).generation.value, difference};
}

bool belongs_in_index(PageState s) {
  return s == PageState::filling || s == PageState::ready;
}

void check_end(const CheckContext& c, std::uint32_t bucket, const IndexWalk::Chain& chain) {
  auto id = [&](FindingKind kind) {
    return FindingId{kind, SectionKind::index_buckets, bucket, chain.bad_link};
  };
  switch (chain.end) {
    case ChainEnd::whole:
      break;
    case ChainEnd::out_of_range:
      c.out.add(id(FindingKind::link_out_of_range), Proof::structure,
                "the chain of bucket {} leads to page {} of {}", bucket, chain.bad_link, c.t.pages.size());
      break;
    case ChainEnd::cycle:
      c.out.add(id(FindingKind::cycle_in_chain), Proof::structure,
                "the chain of bucket {} comes back to page {} after {} pages", bucket, chain.bad_link,
                chain.length);
      break;
    case ChainEnd::shared:
      c.out.add(id(FindingKind::two_chains), Proof::structure,
                "page {} is in the chain of bucket {} and in that of bucket {}", chain.bad_link, bucket,
                c.walk.bucket_of(chain.bad_link));
      break;
  }
}

// Equal keys have equal hashes: they can only meet in one chain.
void check_duplicates(const CheckContext& c, std::span<const std::uint32_t> pages) {
  if (pages.size() < 2) return;
  std::vector<std::tuple<std::uint32_t, std::array<std::uint64_t, 4>, std::uint32_t>> keys;
  keys.reserve(pages.size());
  for (const std::uint32_t page : pages) {
    keys.emplace_back(get(c.t.pages[page].namespace_id), load_key(c.t.pages[page]).words, page);
  }
  std::sort(keys.begin(), keys.end());
  for (std::size_t i = 1; i < keys.size(); ++i) {
    const auto& [ns, key, page] = keys[i];
    if (ns != std::get<0>(keys[i - 1]) || key != std::get<1>(keys[i - 1])) continue;
    c.out.add(page_id(c, FindingKind::duplicate_key, page), Proof::structure,
              "pages {} and {} of namespace {} are in the index with the same key", std::get<2>(keys[i - 1]),
              page, ns);
  }
}

}  // namespace

void check_index(const CheckContext& c) {
  const std::uint64_t seed = get(c.t.header->hash_seed);
  const std::uint64_t mask = c.t.index.size() - 1;
  for (std::uint32_t bucket = 0; bucket < c.walk.chains().size(); ++bucket) {
    const IndexWalk::Chain& chain = c.walk.chains()[bucket];
    const auto version = static_cast<std::uint32_t>(get(c.t.index[bucket].head) >> 32);
    if (version % 2 != 0) {
      c.out.add({FindingKind::half_made_change, SectionKind::index_buckets, bucket, version},
                Proof::structure, "bucket {} has version {}: its chain was left in the middle of a change",
                bucket, version);
    }
    check_end(c, bucket, chain);
    const auto pages = c.walk.pages_of(chain);
    for (const std::uint32_t page : pages) {
      const PageWord word = word_of(c, page);
      if (!belongs_in_index(word.state)) {
        c.out.add(page_id(c, FindingKind::orphan_in_index, page), Proof::structure,
                  "page {} is {} but the chain of bucket {} leads to it", page, to_string(word.state),
                  bucket);
        continue;
      }
      const NamespaceId ns{get(c.t.pages[page].namespace_id)};
      const std::uint64_t expected = index_hash(load_key(c.t.pages[page]), ns, seed) & mask;
      if (expected != bucket) {
        c.out.add(page_id(c, FindingKind::wrong_bucket, page), Proof::structure,
                  "page {} is in the chain of bucket {}, its key belongs in bucket {}", page, bucket,
                  expected);
      }
    }
    check_duplicates(c, pages);
  }
  for (std::uint32_t page = 0; page < c.t.pages.size(); ++page) {
    const PageWord word = word_of(c, page);
    if (!belongs_in_index(word.state) || c.walk.bucket_of(page) != kNone32) continue;
    c.out.add(page_id(c, FindingKind::missing_from_index, page), Proof::structure,
              "page {} is {} but no chain leads to it", page, to_string(word.state));
  }
}

}  // namespace hicache::inspect
