// What a new daemon makes of a region whose owner died in the state that a test holds in its hands: the real
// takeover, over a copy, with everything proved that must hold afterwards.
#pragma once

#include <array>
#include <cstring>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "shm/process.hpp"
#include "tests/crash/region_surgeon.hpp"
#include "tests/crash/stepping/daemon_inside.hpp"
#include "tests/support/test_rank.hpp"
#include "tools/dump/checker.hpp"

namespace hicache::test {

using Key = std::array<std::uint64_t, 4>;

inline std::set<Key> ready_keys(const Tables& t) {
  std::set<Key> keys;
  for (const PageEntry& page : t.pages) {
    if (PageWord::decode(page.word.load(std::memory_order_relaxed)).readable())
      keys.insert({page.key[0], page.key[1], page.key[2], page.key[3]});
  }
  return keys;
}

// A ready page's bytes are those that the tests write under its key.
inline void check_bytes(const Tables& t, std::uint32_t i, const std::uint8_t* pool,
                        std::vector<std::string>& faults) {
  const PageEntry& page = t.pages[i];
  const NamespaceEntry& ns = t.namespaces[page.namespace_id.load()];
  PrefixHash key;
  for (std::size_t w = 0; w < 4; ++w) key.words[w] = page.key[w].load();
  for (std::uint32_t shard = 0; shard < ns.shards.load(); ++shard) {
    const auto* words = reinterpret_cast<const std::uint64_t*>(pool + page.pool_offset.load() +
                                                               shard * ns.shard_stride.load());
    std::uint64_t n = 0;
    while (n < ns.shard_bytes.load() / 8 && words[n] == page_content(key, shard, n)) ++n;
    if (n == ns.shard_bytes.load() / 8) continue;
    faults.push_back("page " + std::to_string(i) + " shard " + std::to_string(shard) +
                     " is ready with bytes that are not its own");
  }
}

class Recovery {
 public:
  // The copy lives under config's name with "-copy" behind it.
  explicit Recovery(daemon::Config config) : config_(std::move(config)) {
    config_.name += "-copy";
    daemon::RegionOwner made = TestRank::take(
        daemon::RegionOwner::create(config_, config_.socket.path, daemon::RegionOwner::Start::fresh));
    made.publish();
    copy_ = std::make_unique<RegionSurgeon>(config_.name);
  }
  ~Recovery() { remove_shm_leftovers(config_.name); }
  Recovery(const Recovery&) = delete;
  Recovery& operator=(const Recovery&) = delete;

  struct Outcome {
    std::set<Key> kept;
    std::vector<std::string> faults;
  };
  // Takes over `control`; `pool` is where its pages' bytes lie.
  Outcome run(std::span<const std::uint8_t> control, const std::uint8_t* pool) {
    Outcome out;
    RegionHeader& header = *copy_->tables().header;
    std::memcpy(static_cast<void*>(&header), control.data(), control.size());
    // The stepped process stands still but lives, and a takeover would wait for its end.
    std::vector<std::uint64_t> died_with;
    for (const PageEntry& page : copy_->tables().pages) died_with.push_back(page.word.load());
    const bool sealed = header.header_crc.load() == header_crc(header);
    header.daemon_pid.store(static_cast<std::uint32_t>(::getpid()));
    if (sealed) header.header_crc.store(header_crc(header));
    auto region = daemon::RegionOwner::create(config_, config_.socket.path);
    if (!region) {
      out.faults.push_back(region.error().message);
      return out;
    }
    if (!region->taken_over()) {
      out.faults.emplace_back("the region was not taken over");
      copy_ = std::make_unique<RegionSurgeon>(config_.name);
      return out;
    }
    daemon::Coordinator::Impl coordinator(
        daemon::CoordinatorOptions{config_, region->tables(), true, region->pool_bytes(), nullptr});
    region->publish();
    check(*region, pool, died_with, out);
    // The rebuilt lists give everything back.
    coordinator.evict_pages(~0u);
    if (coordinator.pages.resident() != 0 || coordinator.pages.slots().used_bytes() != 0) {
      out.faults.push_back(std::to_string(coordinator.pages.resident()) +
                           " pages are left after everything was evicted");
    }
    return out;
  }

 private:
  void check(const daemon::RegionOwner& region, const std::uint8_t* pool,
             const std::vector<std::uint64_t>& died_with, Outcome& out) const {
    inspect::MemorySource source(
        {reinterpret_cast<const std::uint8_t*>(region.tables().header), region.region_bytes()});
    const auto snapshot = inspect::Snapshot::take(source);
    if (!snapshot.usable()) out.faults.push_back("the region is " + snapshot.verdict().why);
    const inspect::Findings findings = inspect::check_snapshot(snapshot, true);
    for (const auto& finding : findings.list()) out.faults.push_back(finding.text);
    const Tables& t = region.tables();
    out.kept = ready_keys(t);
    for (std::uint32_t i = 0; i < t.pages.size(); ++i) {
      if (PageWord::decode(t.pages[i].word.load()).readable()) check_bytes(t, i, pool, out.faults);
      const Generation before = PageWord::decode(died_with[i]).generation;
      if (PageWord::decode(t.pages[i].word.load()).generation.value < before.value)
        out.faults.push_back("page " + std::to_string(i) + " goes back to an earlier generation");
    }
  }

  daemon::Config config_;
  std::unique_ptr<RegionSurgeon> copy_;
};

}  // namespace hicache::test
