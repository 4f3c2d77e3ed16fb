// The prefix tree's decisions, on tiers in memory.
#include "hicache/controller/prefix_tree.hpp"

#include <algorithm>
#include <numeric>
#include <random>

#include "tests/support/catch.hpp"
#include "tests/support/memory_tier.hpp"

namespace hicache::test {
namespace {

using Hashes = std::vector<PrefixHash>;
using Slots = std::vector<std::uint64_t>;

PrefixTreeOptions options(std::uint32_t page_tokens, WritePolicy policy = WritePolicy::write_through) {
  PrefixTreeOptions o;
  o.page_tokens = page_tokens;
  o.write_policy = policy;
  return o;
}

struct Rig {
  explicit Rig(const PrefixTreeOptions& o, std::uint64_t device = 4096, std::uint64_t host = 4096)
      : page_tokens(o.page_tokens), tier(device, host, o.page_tokens), tree(o, tier) {}

  // What an engine does with a request: match, compute the rest, insert, give the duplicates back.
  NodeId run(const Hashes& hashes, bool chunked = false) {
    const auto found = tree.match(hashes);
    auto slots = found.device_slots;
    const auto fresh = tier.device->alloc(hashes.size() * page_tokens - slots.size());
    REQUIRE(fresh.ok());
    slots.insert(slots.end(), fresh->begin(), fresh->end());
    const auto inserted = tree.insert(hashes, slots, chunked);
    REQUIRE(inserted.ok());
    REQUIRE(tier.device->free(inserted->duplicates).ok());
    CHECK(tree.check().empty());
    return inserted->node;
  }
  void finish(std::uint64_t kept = ~0ull) {
    tree.apply(tier.finish(kept));
    CHECK(tree.check() == "");
  }
  NodeView view(NodeId id) {
    const auto v = tree.view(id);
    REQUIRE(v.ok());
    return *v;
  }

  std::uint32_t page_tokens;
  MemoryTier tier;
  PrefixTree tree;
};

Hashes extend(Hashes base, std::uint32_t id, std::uint32_t tokens, std::uint32_t page_tokens) {
  for (std::uint32_t page = 0; page < tokens / page_tokens; ++page) {
    std::vector<std::uint32_t> list(page_tokens, id * 1000 + page);
    base.push_back(hash_page(list, base.empty() ? std::nullopt : std::optional(base.back())));
  }
  return base;
}

}  // namespace

TEST_CASE("AC-44 an unknown write policy is refused by name") {
  const auto refused = parse_write_policy("write_around");
  CHECK(refused.status() == Status::invalid_argument);
  CHECK(refused.error().message == "Invalid write policy: write_around");
  CHECK(*parse_write_policy("write_back") == WritePolicy::write_back);
  CHECK(*parse_write_policy("write_through_selective") == WritePolicy::write_through_selective);
  CHECK(parse_tree_policy("fifo").status() == Status::invalid_argument);
  CHECK(*parse_tree_policy("scan_resistant") == TreePolicy::scan_resistant);
}

TEST_CASE("AC-66 a node is written when its hits reach the threshold, chunks count as none") {
  const Hashes prompt = chain(1, 8, 4);
  for (const std::uint32_t threshold : {1u, 2u, 3u}) {
    auto o = options(4, threshold == 1 ? WritePolicy::write_through : WritePolicy::write_through_selective);
    o.selective_threshold = threshold;
    Rig rig(o);
    for (std::uint32_t insert = 1; insert <= 3; ++insert) {
      rig.run(prompt);
      CHECK(rig.tier.writes == (insert >= threshold ? 1 : 0));
      rig.finish();
    }
  }
  Rig back(options(4, WritePolicy::write_back));
  for (int i = 0; i < 3; ++i) back.run(prompt);
  CHECK(back.tier.writes == 0);
  Rig chunked(options(4));
  for (int i = 0; i < 3; ++i) chunked.run(prompt, true);
  CHECK(chunked.tier.writes == 0);
  chunked.run(prompt);
  CHECK(chunked.tier.writes == 1);
}

TEST_CASE("AC-67 a match ends at a whole page") {
  Rig rig(options(4));
  rig.run(chain(1, 8, 4));
  // The last two of ten tokens are no page: they have no hash.
  const auto found = rig.tree.match(chain(1, 10, 4));
  CHECK(found.device_slots.size() == 8);
}

TEST_CASE("AC-68 the device evicts whole leaves in the order of use, and a locked one stays") {
  for (const bool locked : {false, true}) {
    for (const std::uint64_t wanted : {192u, 200u}) {
      Rig rig(options(64));
      const Hashes a = extend({}, 1, 64, 64);
      const Hashes b = extend(a, 2, 64, 64);
      const Hashes c = extend(a, 3, 64, 64);
      const Hashes d = extend({}, 4, 64, 64);
      rig.run(a);
      const NodeId nb = rig.run(b);
      const NodeId nc = rig.run(c);
      const NodeId nd = rig.run(d);
      rig.finish();
      const NodeId na = rig.view(nb).parent;
      for (const Hashes& use : {b, d, c, a}) rig.tree.match(use);  // times A 10, B 5, C 7, D 6
      if (locked) REQUIRE(rig.tree.lock(nc).ok());
      const std::uint64_t freed = rig.tree.evict(wanted);
      const auto evicted = [&](NodeId id) { return rig.view(id).device_slots.empty(); };
      if (locked) {
        CHECK(freed == 128);
        CHECK((evicted(nb) && evicted(nd) && !evicted(nc) && !evicted(na)));
      } else {
        CHECK(freed == (wanted == 192 ? 192 : 256));
        CHECK((evicted(nb) && evicted(nd) && evicted(nc)));
        CHECK(evicted(na) == (wanted == 200));
      }
      CHECK(rig.tree.nodes() == 4);  // all on the host
      CHECK(rig.tree.check() == "");
    }
  }
}

TEST_CASE("AC-68 leaves go one by one, the least recently used first") {
  Rig rig(options(64));
  std::vector<NodeId> nodes;
  for (std::uint32_t i = 1; i <= 4; ++i) nodes.push_back(rig.run(extend({}, i, 64, 64)));
  rig.finish();
  for (const std::uint32_t i : {2u, 4u, 3u, 1u}) rig.tree.match(extend({}, i, 64, 64));
  for (const std::size_t next : {1u, 3u, 2u, 0u}) {
    CHECK_FALSE(rig.view(nodes[next]).device_slots.empty());
    CHECK(rig.tree.evict(1) == 64);
    CHECK(rig.view(nodes[next]).device_slots.empty());
  }
  CHECK(rig.tree.evict(1) == 0);
}

TEST_CASE("AC-69 host eviction passes over what is held") {
  Rig rig(options(64));
  const NodeId b = rig.run(extend({}, 2, 64, 64));
  const NodeId d = rig.run(extend({}, 4, 64, 64));
  rig.finish();
  rig.tree.match(extend({}, 2, 64, 64));  // b is used later: without the hold d would go
  REQUIRE(rig.tree.evict(128) == 128);
  REQUIRE(rig.tree.lock_host(d).ok());
  CHECK(rig.tree.evict_host(64) == 64);
  CHECK_FALSE(rig.tree.view(b).ok());
  CHECK(rig.view(d).host_slots.size() == 64);
  CHECK(rig.tree.evict_host(64) == 0);
  REQUIRE(rig.tree.unlock_host(d).ok());
  CHECK(rig.tree.unlock_host(d).status() == Status::already_released);
  CHECK(rig.tree.evict_host(64) == 64);
  CHECK(rig.tree.nodes() == 0);
  CHECK(rig.tier.host->available() == 4096);
}

TEST_CASE("host eviction trims the last node from its tail to what is needed") {
  Rig rig(options(4));
  const Hashes prompt = chain(1, 40, 4);
  rig.run(prompt);
  rig.finish();
  REQUIRE(rig.tree.evict(40) == 40);
  CHECK(rig.tree.evict_host(10) == 12);
  CHECK(rig.tree.match(prompt).host_tokens == 28);
  CHECK(rig.tier.host->available() == 4096 - 28);
  CHECK(rig.tree.check() == "");
}

TEST_CASE("AC-70 a load back needs enough tokens and a quota that holds them") {
  const auto rig_with = [](Rig& rig, std::uint32_t second) {
    const Hashes first = extend({}, 1, 4, 1);
    const Hashes both = extend(first, 2, second, 1);
    rig.run(first);
    const NodeId end = rig.run(both);
    rig.finish();
    REQUIRE(rig.tree.evict(4 + second) == 4 + second);
    return end;
  };
  Rig nine(options(1));
  CHECK(nine.tree.load_back(rig_with(nine, 5), 1000).status() == Status::not_found);
  CHECK(nine.tier.holds == 0);
  Rig ten(options(1));
  const NodeId end = rig_with(ten, 6);
  CHECK(ten.tree.load_back(end, 9).status() == Status::too_large);
  const auto loaded = ten.tree.load_back(end, 10);
  REQUIRE(loaded.ok());
  CHECK(loaded->device_slots.size() == 10);
  CHECK(ten.view(end).locks == 1);
  CHECK(ten.tree.evict(10) == 0);  // not while it loads
  ten.finish();
  CHECK(ten.view(end).locks == 0);
  CHECK(ten.tree.evict(10) == 10);
  CHECK(ten.tree.check() == "");
}

TEST_CASE("AC-71 a split node shares locks and hits, and the child keeps the id") {
  Rig rig(options(4, WritePolicy::write_through_selective));
  const Hashes prompt = chain(1, 12, 4);
  const NodeId node = rig.run(prompt);
  rig.run(prompt);
  rig.run(prompt);
  rig.finish();
  REQUIRE(rig.tree.lock(node).ok());
  REQUIRE(rig.tree.lock(node).ok());
  const NodeView whole = rig.view(node);
  REQUIRE(whole.hits == 3);
  const auto found = rig.tree.match(std::span(prompt).first(2));
  const NodeView parent = rig.view(found.device_node);
  const NodeView child = rig.view(node);
  CHECK(child.parent == parent.id);
  CHECK(parent.hashes == Hashes{prompt[0], prompt[1]});
  CHECK(child.hashes == Hashes{prompt[2]});
  CHECK((parent.locks == 2 && child.locks == 2));
  CHECK(parent.hits == 3);
  CHECK(parent.device_slots == Slots(whole.device_slots.begin(), whole.device_slots.begin() + 8));
  CHECK(child.device_slots == Slots(whole.device_slots.begin() + 8, whole.device_slots.end()));
  CHECK(parent.host_slots == Slots(whole.host_slots.begin(), whole.host_slots.begin() + 8));
  CHECK(child.host_slots == Slots(whole.host_slots.begin() + 8, whole.host_slots.end()));
  REQUIRE(rig.tree.unlock(node).ok());
  REQUIRE(rig.tree.unlock(node).ok());
  CHECK(rig.tree.unlock(node).status() == Status::already_released);
  CHECK(rig.tree.check() == "");
}

TEST_CASE("an ack finds its node after a split, and what the host did not keep is not on the host") {
  Rig rig(options(4));
  const Hashes prompt = chain(1, 16, 4);
  const NodeId node = rig.run(prompt);
  rig.tree.match(std::span(prompt).first(1));
  rig.tree.match(std::span(prompt).first(3));
  CHECK(rig.view(node).writing);
  CHECK(rig.tree.evict(16) == 0);  // everything is being written
  rig.finish(8);
  CHECK(rig.view(node).host_slots.empty());
  CHECK(rig.tree.host_tokens() == 4);  // of the run 4 | 8 | 4 only the first part is whole
  CHECK(rig.tier.host->available() == 4096 - 4);
  CHECK(rig.tree.writing() == 0);
  CHECK(rig.tree.evict(16) == 16);
  CHECK(rig.tree.nodes() == 1);
}

TEST_CASE("an evicted prefix that is computed again is on the device without a load") {
  Rig rig(options(4));
  const Hashes prompt = chain(1, 16, 4);
  const NodeId node = rig.run(prompt);
  rig.finish();
  REQUIRE(rig.tree.evict(16) == 16);
  CHECK(rig.tree.match(prompt).host_tokens == 16);
  CHECK(rig.tree.match(prompt).host_node == node);
  rig.run(prompt);
  CHECK(rig.tree.match(prompt).device_slots.size() == 16);
  CHECK(rig.tier.writes == 1);
  const auto slots = rig.view(node).host_slots;
  CHECK(*rig.tier.host->state(slots) == HostPageState::synced);
  CHECK(rig.tree.evict(16) == 16);
  CHECK(*rig.tier.host->state(slots) == HostPageState::backup);
}

TEST_CASE("slots that the tree has already are the caller's to free") {
  Rig rig(options(4));
  const Hashes prompt = chain(1, 8, 4);
  rig.run(prompt);
  const auto twice = rig.tier.device->alloc(8);
  const auto inserted = rig.tree.insert(prompt, *twice);
  REQUIRE(inserted.ok());
  CHECK(inserted->duplicates == *twice);
  CHECK(inserted->matched_tokens == 8);
  CHECK(rig.tree.insert(prompt, std::span(*twice).first(4)).status() == Status::invalid_argument);
}

TEST_CASE("write_back writes at eviction, ancestors first, and then frees the device") {
  Rig rig(options(4, WritePolicy::write_back));
  const Hashes first = extend({}, 1, 8, 4);
  const Hashes both = extend(first, 2, 8, 4);
  rig.run(first);
  rig.run(both);
  CHECK(rig.tree.host_tokens() == 0);
  CHECK(rig.tree.evict(8) == 8);
  CHECK(rig.tier.writes == 2);
  const auto found = rig.tree.match(both);
  CHECK(found.device_slots.size() == 8);
  CHECK(found.host_tokens == 8);
  CHECK(rig.tree.evict(8) == 8);
  CHECK(rig.tree.match(both).host_tokens == 16);
  CHECK(rig.tier.writes == 2);
  CHECK(rig.tree.check() == "");
}

TEST_CASE("without host handles the oldest host page makes room, and what finds none is not written") {
  Rig rig(options(4), 4096, 8);
  rig.run(chain(1, 8, 4));
  rig.finish();
  REQUIRE(rig.tree.evict(8) == 8);
  const NodeId second = rig.run(chain(2, 8, 4));
  CHECK(rig.view(second).host_slots.size() == 8);
  CHECK(rig.tree.match(chain(1, 8, 4)).host_tokens == 0);
  const NodeId third = rig.run(chain(3, 8, 4));  // the second is being written: nothing can go
  CHECK(rig.view(third).host_slots.empty());
  rig.finish();
}

TEST_CASE("a load back that finds the pool emptier forgets the rest, and loads what is left") {
  Rig rig(options(4));
  const Hashes prompt = chain(1, 32, 4);
  const NodeId node = rig.run(prompt);
  rig.finish();
  REQUIRE(rig.tree.evict(32) == 32);
  rig.tier.lost.insert(prompt[5].words);
  const auto loaded = rig.tree.load_back(node, 1000);
  REQUIRE(loaded.ok());
  CHECK(loaded->device_slots.size() == 20);
  CHECK(rig.tree.check() == "");
  rig.finish();
  const auto found = rig.tree.match(prompt);
  CHECK(found.device_slots == loaded->device_slots);
  CHECK(found.host_tokens == 0);
  rig.tier.lost.insert(prompt[1].words);
  REQUIRE(rig.tree.evict(20) == 20);
  CHECK(rig.tree.load_back(loaded->node, 1000).status() == Status::not_found);
  CHECK(rig.tree.match(prompt).host_tokens == 4);
  CHECK(rig.tier.holds == 0);
}

TEST_CASE("a load back makes room on the device, but not of its own ancestors") {
  Rig rig(options(4), 32);
  const Hashes first = chain(1, 16, 4);
  const Hashes both = extend(first, 9, 16, 4);
  rig.run(first);
  const NodeId end = rig.run(both);
  rig.finish();
  REQUIRE(rig.tree.evict(16) == 16);
  const NodeId other = rig.run(chain(2, 16, 4));
  rig.finish();
  rig.tree.match(chain(2, 16, 4));  // newer than the ancestor
  // The other prompt's tokens count as room, the ancestor's do not.
  CHECK(rig.tree.load_back(end, 31).status() == Status::too_large);
  const auto loaded = rig.tree.load_back(end, 32);
  REQUIRE(loaded.ok());
  CHECK(rig.view(other).device_slots.empty());
  CHECK(rig.tree.match(both).device_slots.size() == 32);
  rig.finish();
}

TEST_CASE("a load that failed leaves nothing to be matched, and its slots go when nobody holds them") {
  Rig rig(options(4));
  const Hashes prompt = chain(1, 32, 4);
  const NodeId node = rig.run(prompt);
  rig.finish();
  REQUIRE(rig.tree.evict(32) == 32);
  REQUIRE(rig.tree.load_back(node, 1000).ok());
  REQUIRE(rig.tree.lock(node).ok());  // a request that waits for it
  rig.finish(0);
  CHECK(rig.tree.match(prompt).device_slots.empty());
  CHECK(rig.tier.device->available() == 4096 - 32);
  REQUIRE(rig.tree.unlock(node).ok());
  CHECK(rig.tier.device->available() == 4096);
  CHECK(rig.tree.match(prompt).host_tokens == 32);
  CHECK(rig.tree.load_back(node, 1000).ok());
  rig.finish();
  CHECK(rig.tree.match(prompt).device_slots.size() == 32);
}

TEST_CASE("lfu keeps what is used often, scan_resistant what a long scan would push out of lru") {
  const auto hot_survives = [](TreePolicy policy, int uses) {
    auto o = options(4);
    o.eviction = policy;
    Rig rig(o, 40);
    const Hashes hot = chain(1, 8, 4);
    for (int i = 0; i < uses; ++i) rig.run(hot);
    rig.finish();
    for (std::uint32_t scan = 10; scan < 40; ++scan) {
      while (rig.tier.device->available() < 8) REQUIRE(rig.tree.evict(8) > 0);
      rig.run(chain(scan, 8, 4));
      rig.finish();
    }
    return rig.tree.match(hot).device_slots.size() == 8;
  };
  CHECK_FALSE(hot_survives(TreePolicy::lru, 3));
  CHECK(hot_survives(TreePolicy::lfu, 3));
  CHECK(hot_survives(TreePolicy::scan_resistant, 3));
  CHECK_FALSE(hot_survives(TreePolicy::scan_resistant, 1));
}

TEST_CASE("scan_resistant takes what comes back soon for hot, and does not let the hot take everything") {
  EvictionOrder order(TreePolicy::scan_resistant);
  EvictionOrder::Place cold;
  EvictionOrder::Place used_often;
  EvictionOrder::Place returned;
  order.put(cold, 1, {10, 10, 1, false}, 10);
  order.put(used_often, 2, {5, 5, 3, false}, 85);
  CHECK(order.first() == 1);
  order.put(returned, 3, {6, 6, 1, true}, 10);
  CHECK(order.first() == 2);  // more than nine tenths are hot: the oldest of them goes
  order.erase(used_often);
  order.erase(used_often);  // it stands nowhere: nothing happens
  CHECK(order.first() == 1);
  CHECK(order.tokens() == 20);
  GhostList ghosts(2);
  const auto hashes = chain(1, 12, 4);
  for (const auto& hash : hashes) ghosts.add(hash);
  CHECK_FALSE(ghosts.take(hashes[0]));
  CHECK(ghosts.take(hashes[1]));
  CHECK_FALSE(ghosts.take(hashes[1]));
}

TEST_CASE("pages that others wrote are adopted behind what the tree knows, and loaded") {
  Rig rig(options(4), 64, 24);
  const Hashes prompt = chain(1, 32, 4);
  CHECK(*rig.tree.adopt(prompt) == 0);
  for (std::size_t page = 0; page < 5; ++page) rig.tier.elsewhere.insert(prompt[page].words);
  rig.run(Hashes(prompt.begin(), prompt.begin() + 2));
  CHECK(*rig.tree.adopt(prompt) == 12);  // being written is good enough: the rest follows it
  rig.finish();
  CHECK(*rig.tree.adopt(prompt) == 0);
  const auto found = rig.tree.match(prompt);
  CHECK(found.device_slots.size() == 8);
  CHECK(found.host_tokens == 12);
  const auto loaded = rig.tree.load_back(found.host_node, 100);
  REQUIRE(loaded.ok());
  CHECK(loaded->device_slots.size() == 12);
  rig.finish();
  CHECK(rig.tree.match(prompt).device_slots.size() == 20);
  // Room is made by giving up older handles, never those that it stands on.
  const Hashes other = chain(2, 16, 4);
  for (const PrefixHash& hash : other) rig.tier.elsewhere.insert(hash.words);
  CHECK(rig.tree.adopt(other).status() == Status::no_space);
  REQUIRE(rig.tree.evict(12) == 12);
  CHECK(*rig.tree.adopt(other) == 16);
  CHECK(rig.tree.host_tokens() == 24);
  CHECK(rig.tree.check() == "");
}

TEST_CASE("what is loaded while the write before it fails keeps no host copy that nobody could find") {
  // The first two pages are being written; the pool has what follows, and the load of it begins.
  for (const bool load_ends_first : {false, true}) {
    for (const bool write_fails : {false, true}) {
      CAPTURE(load_ends_first, write_fails);
      Rig rig(options(4));
      const Hashes prompt = chain(1, 32, 4);
      for (std::size_t page = 0; page < 5; ++page) rig.tier.elsewhere.insert(prompt[page].words);
      const NodeId top = rig.run(Hashes(prompt.begin(), prompt.begin() + 2));
      REQUIRE(*rig.tree.adopt(prompt) == 12);
      const auto loaded = rig.tree.load_back(rig.tree.match(prompt).host_node, 100);
      REQUIRE(loaded.ok());
      auto acks = rig.tier.finish();
      REQUIRE(acks.size() == 2);
      REQUIRE(acks[0].kind == OperationKind::write);
      if (write_fails) acks[0].host_tokens = 0;
      if (load_ends_first) std::swap(acks[0], acks[1]);
      for (const HiCacheAck& ack : acks) {
        rig.tree.apply(ack);
        CHECK(rig.tree.check() == "");
      }
      // The answer is right either way; the copies behind a lost one are given back.
      CHECK(rig.tree.match(prompt).device_slots.size() == 20);
      CHECK(rig.view(top).host_slots.empty() == write_fails);
      CHECK(rig.view(loaded->node).host_slots.empty() == write_fails);
      CHECK(rig.tree.host_tokens() == (write_fails ? 0 : 20));
    }
  }
}

TEST_CASE("a host copy that was locked when its prefix left the host goes when it is unlocked") {
  Rig rig(options(4));
  const Hashes prompt = chain(1, 32, 4);
  for (std::size_t page = 0; page < 5; ++page) rig.tier.elsewhere.insert(prompt[page].words);
  rig.run(Hashes(prompt.begin(), prompt.begin() + 2));
  REQUIRE(*rig.tree.adopt(prompt) == 12);
  const NodeId end = rig.tree.match(prompt).host_node;
  REQUIRE(rig.tree.lock_host(end).ok());
  rig.finish(0);  // the write keeps nothing
  CHECK(rig.tree.host_tokens() == 12);
  REQUIRE(rig.tree.unlock_host(end).ok());
  CHECK(rig.tree.check() == "");
  CHECK(rig.tree.host_tokens() == 0);
  CHECK(rig.tree.match(prompt).host_tokens == 0);
}

TEST_CASE("a pinned prefix stays until its time, and pins are bounded") {
  auto o = options(4);
  o.pinnable_tokens = 16;
  Rig rig(o);
  const Hashes prompt = chain(1, 16, 4);
  rig.run(prompt);
  rig.run(chain(2, 16, 4));
  rig.finish();
  CHECK(rig.tree.pin(chain(3, 8, 4), 100).status() == Status::not_found);
  REQUIRE(rig.tree.pin(std::span(prompt).first(3), 100).ok());
  CHECK(rig.tree.pinned_tokens() == 12);
  CHECK(rig.tree.pin(chain(2, 16, 4), 100).status() == Status::no_space);
  REQUIRE(rig.tree.pin(std::span(prompt).first(3), 50).ok());  // never shortens
  rig.tree.match(std::span(prompt).first(1));                  // a split takes the pin along
  CHECK(rig.tree.evict(1000) == 20);
  CHECK(rig.tree.evict_host(1000) == 20);
  rig.tree.expire_pins(99);
  CHECK(rig.tree.evict(1000) == 0);
  CHECK(rig.tree.match(prompt).device_slots.size() == 12);
  rig.tree.expire_pins(100);
  CHECK(rig.tree.pinned_tokens() == 0);
  CHECK(rig.tree.evict(1000) == 12);
  CHECK(rig.tree.check() == "");
}

TEST_CASE("a reset of one tier leaves what the other one holds") {
  for (const ResetTiers tiers : {ResetTiers::device, ResetTiers::host}) {
    Rig rig(options(4));
    const Hashes backed = chain(1, 24, 4);
    rig.run(backed);
    rig.finish();
    CHECK(rig.tree.evict(24) == 24);
    // Written and on the device; then one that is only on the device, because its write was not kept.
    const NodeId both = rig.run(chain(2, 16, 4));
    rig.finish();
    const NodeId device_only = rig.run(chain(3, 8, 4));
    rig.tree.apply(rig.tier.finish(0));
    REQUIRE(rig.tree.lock(both).ok());
    REQUIRE(rig.view(device_only).host_slots.empty());
    rig.tree.reset(tiers);
    CHECK(rig.tree.check() == "");
    const auto first = rig.tree.match(backed);
    const auto second = rig.tree.match(chain(2, 16, 4));
    const auto third = rig.tree.match(chain(3, 8, 4));
    if (tiers == ResetTiers::device) {
      CHECK(rig.tree.device_tokens() == 0);
      CHECK((first.host_tokens == 24 && second.host_tokens == 16 && third.host_node == PrefixTree::kRoot));
      CHECK(rig.view(both).locks == 0);
      CHECK(rig.tree.evict_host(1000) == 40);
      CHECK(rig.tree.nodes() == 0);
    } else {
      CHECK(rig.tree.host_tokens() == 0);
      CHECK((first.host_node == PrefixTree::kRoot && first.device_slots.empty()));
      CHECK((second.device_slots.size() == 16 && third.device_slots.size() == 8));
      CHECK(rig.view(both).locks == 1);  // a lock on the device copy, which is still there
    }
  }
}

TEST_CASE("two trees that see the same calls make the same decisions, whatever is thrown at them") {
  const unsigned seed = std::random_device{}();
  INFO("seed " << seed);
  for (const WritePolicy policy :
       {WritePolicy::write_through, WritePolicy::write_through_selective, WritePolicy::write_back}) {
    for (const TreePolicy eviction : {TreePolicy::lru, TreePolicy::lfu, TreePolicy::scan_resistant}) {
      std::mt19937 random(seed);
      auto o = options(4, policy);
      o.eviction = eviction;
      o.load_back_threshold = 8;
      o.pinnable_tokens = 64;
      Rig a(o, 512, 768);
      Rig b(o, 512, 768);
      const auto pick = [&](std::uint32_t n) { return static_cast<std::uint32_t>(random() % n); };
      for (std::uint32_t step = 0; step < 1500; ++step) {
        const std::uint32_t pages = 1 + pick(20);
        Hashes prompt = chain(pick(6), 4 * (1 + pick(pages)), 4);
        prompt = extend(std::move(prompt), pick(5), 4 * pick(6), 4);
        const std::uint32_t what = pick(12);
        const std::uint64_t kept = pick(4) == 0 ? 4 * pick(4) : ~0ull;
        const std::uint32_t amount = 4 * pick(60);
        std::vector<std::uint64_t> answers[2];
        for (Rig* rig : {&a, &b}) {
          auto& said = answers[rig == &a ? 0 : 1];
          PrefixTree& tree = rig->tree;
          if (what < 5) {
            while (rig->tier.device->available() < prompt.size() * 4 && tree.evict(prompt.size() * 4) > 0) {
            }
            if (rig->tier.device->available() >= prompt.size() * 4) {
              said.push_back(static_cast<std::uint64_t>(rig->run(prompt, what == 0)));
            }
          } else if (what < 7) {
            const auto found = tree.match(prompt);
            said.insert(said.end(), found.device_slots.begin(), found.device_slots.end());
            said.push_back(found.host_tokens);
            const auto back = tree.load_back(found.host_node, 200);
            said.push_back(static_cast<std::uint64_t>(back.status()));
            if (back) said.insert(said.end(), back->device_slots.begin(), back->device_slots.end());
          } else if (what == 7) {
            said.push_back(tree.evict(amount));
          } else if (what == 8) {
            said.push_back(tree.evict_host(amount));
          } else if (what == 9) {
            for (const PrefixHash& hash : prompt) rig->tier.lost.insert(hash.words);
            if (amount < 40) rig->tier.lost.clear();
          } else if (what == 11 && amount < 80) {
            for (const PrefixHash& hash : prompt) rig->tier.elsewhere.insert(hash.words);
            const auto adopted = tree.adopt(prompt);
            said.push_back(adopted ? *adopted : ~0ull);
            // A load of what was adopted may begin before the write in front of it has ended.
            if (amount < 40) {
              const auto back = tree.load_back(tree.match(prompt).host_node, 200);
              said.push_back(static_cast<std::uint64_t>(back.status()));
            }
          } else if (what == 10 && amount < 40) {
            said.push_back(static_cast<std::uint64_t>(tree.pin(prompt, step + 50).status()));
            tree.expire_pins(step);
          } else {
            tree.apply(rig->tier.finish(kept));
          }
          INFO("step " << step << " action " << what);
          REQUIRE(tree.check() == "");
          // Every slot is the tree's or free: none was lost, none freed twice.
          REQUIRE(tree.device_tokens() + rig->tier.device->available() == 512);
          REQUIRE(tree.host_tokens() + rig->tier.host->available() == 768);
          said.push_back(tree.nodes());
        }
        REQUIRE(answers[0] == answers[1]);
      }
      a.tree.apply(a.tier.finish());
      a.tree.expire_pins(~0ull);
      a.tree.evict(~0ull >> 1);
      a.tree.evict_host(~0ull >> 1);
      CHECK(a.tree.nodes() == 0);
      CHECK(a.tier.host->refused() == 0);
      CHECK(a.tier.holds == 0);
    }
  }
}

}  // namespace hicache::test
