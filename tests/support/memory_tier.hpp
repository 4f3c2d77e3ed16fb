// The tiers below a prefix tree, in memory: device and host slots, and a pool that is a set of hashes. Writes
// and loads end when the test says so.
#pragma once

#include <deque>
#include <memory>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include "hicache/controller/host_page_states.hpp"
#include "hicache/controller/prefix_tree.hpp"
#include "shm/prefix_hash.hpp"

namespace hicache::test {

// Hash chain of a made-up prompt: `tokens` tokens of conversation `id` in pages of page_tokens.
inline std::vector<PrefixHash> chain(std::uint32_t id, std::uint32_t tokens, std::uint32_t page_tokens) {
  std::vector<std::uint32_t> list;
  for (std::uint32_t i = 0; i < tokens; ++i) list.push_back(id * 100'000 + i);
  return hash_chain(list, page_tokens);
}

class MemoryTier : public TreeTier {
 public:
  MemoryTier(std::uint64_t device_tokens, std::uint64_t host_tokens, std::uint32_t page_tokens)
      : device(std::move(*TokenSlots::create(device_tokens, page_tokens))),
        host(std::move(*HostPageStates::create(host_tokens, page_tokens))),
        page_tokens_(page_tokens) {}

  Result<std::vector<std::uint64_t>> write(std::span<const std::uint64_t> device_slots,
                                           std::span<const PrefixHash> hashes,
                                           std::int64_t node_id) override {
    auto slots = host->alloc(hashes.last(device_slots.size() / page_tokens_));
    if (!slots) return slots;
    expect(host->protect_write(*slots));
    open.push_back({OperationKind::write, node_id, *slots, device_slots.size()});
    ++writes;
    return slots;
  }
  Result<std::vector<HiCacheAck>> finish_writes() override { return finish(); }
  Result<HostHold> hold(std::span<const std::uint64_t> host_slots) override {
    const auto hashes = host->hashes(host_slots);
    if (!hashes) return hashes.error();
    HostHold held;
    for (const PrefixHash& hash : *hashes) {
      if (lost.contains(hash.words)) break;
      held.present_tokens += page_tokens_;
      if (stateless.contains(hash.words)) continue;
      held.tokens = held.present_tokens;
    }
    ++holds;
    return held;
  }
  void let_go(const HostHold&) override { --holds; }
  Result<std::vector<std::uint64_t>> load(const HostHold&, std::span<const std::uint64_t> host_slots,
                                          std::int64_t node_id) override {
    auto slots = device->alloc(host_slots.size());
    if (!slots) return slots;
    expect(host->protect_load(host_slots));
    open.push_back({OperationKind::load, node_id, {host_slots.begin(), host_slots.end()}, slots->size()});
    --holds;
    return slots;
  }
  Result<std::vector<std::uint64_t>> adopt(std::span<const PrefixHash> pages) override {
    std::size_t there = 0;
    while (there < pages.size() && elsewhere.contains(pages[there].words)) ++there;
    auto slots = host->alloc(pages.first(there));
    if (slots && there > 0) expect(host->update_prefetch(*slots));
    return slots;
  }
  Outcome evict_device(std::span<const std::uint64_t> device_slots,
                       std::span<const std::uint64_t> host_slots) override {
    expect(device->free(device_slots));
    if (!host_slots.empty()) expect(host->update_backup(host_slots));
    return success();
  }
  Outcome evict_host(std::span<const std::uint64_t> host_slots) override {
    expect(host->free(host_slots));
    return success();
  }
  [[nodiscard]] std::uint64_t host_available() const override { return host->available(); }
  Outcome revive(std::span<const std::uint64_t> host_slots) override {
    expect(host->update_synced(host_slots));
    return success();
  }

  // Ends everything in flight; of each write only the leading `kept` tokens, of each load all or, when
  // kept is 0, nothing.
  std::vector<HiCacheAck> finish(std::uint64_t kept = ~0ull) {
    std::vector<HiCacheAck> acks;
    for (; !open.empty(); open.pop_front()) {
      const Open& one = open.front();
      HiCacheAck ack;
      ack.kind = one.kind;
      ack.node_ids = {one.node};
      ack.tokens = one.tokens;
      const std::uint64_t good = std::min<std::uint64_t>(kept, one.tokens);
      ack.host_tokens = good;
      if (one.kind == OperationKind::load && good < one.tokens) ack.status = Status::timed_out;
      const auto slots = std::span<const std::uint64_t>(one.host);
      if (one.kind == OperationKind::load && good < one.tokens) {
        expect(host->abort_io(slots));
      } else {
        expect(host->complete_io(slots.first(good)));
        expect(host->abort_io(slots.subspan(good)));
      }
      acks.push_back(std::move(ack));
    }
    return acks;
  }

  std::unique_ptr<TokenSlots> device;
  std::unique_ptr<HostPageStates> host;
  std::set<std::array<std::uint64_t, 4>> lost;       // pages that the pool has evicted
  std::set<std::array<std::uint64_t, 4>> elsewhere;  // pages that others have written
  std::set<std::array<std::uint64_t, 4>> stateless;  // pages with which no load may end
  int writes = 0;
  int holds = 0;

 private:
  struct Open {
    OperationKind kind;
    std::int64_t node;
    std::vector<std::uint64_t> host;
    std::uint64_t tokens;
  };
  // The tree must never ask for something wrong.
  static void expect(const Outcome& outcome) {
    if (!outcome) throw std::logic_error(outcome.error().message);
  }
  std::deque<Open> open;
  std::uint32_t page_tokens_;
};

}  // namespace hicache::test
