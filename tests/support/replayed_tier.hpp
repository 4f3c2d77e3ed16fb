// What a tree asked of its tier and was answered, and a tier that gives the same answers to another tree,
// which has to ask the same.
#pragma once

#include <algorithm>
#include <deque>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "hicache/controller/tree_tier.hpp"

namespace hicache::test {

struct TierCall {
  using Slots = std::vector<std::uint64_t>;
  std::string name;
  // What was asked.
  Slots slots;
  Slots more_slots;
  std::vector<PrefixHash> hashes;
  std::int64_t node = kNoNode;
  // The answer.
  std::optional<Error> error;
  Slots given;
  HostHold hold;
  std::vector<HiCacheAck> acks;
  std::uint64_t available = 0;
};

class RecordingTier : public TreeTier {
 public:
  explicit RecordingTier(TreeTier& inner) : inner_(inner) {}
  std::deque<TierCall>& calls() { return calls_; }

  Result<std::vector<std::uint64_t>> write(std::span<const std::uint64_t> device_slots,
                                           std::span<const PrefixHash> chain, std::int64_t node) override {
    return with_slots("write", inner_.write(device_slots, chain, node), device_slots, chain, node);
  }
  Result<std::vector<HiCacheAck>> finish_writes() override {
    auto acks = inner_.finish_writes();
    TierCall& call = add("finish_writes");
    if (acks) {
      call.acks = *acks;
    } else {
      call.error = acks.error();
    }
    return acks;
  }
  Result<HostHold> hold(std::span<const std::uint64_t> host_slots) override {
    auto held = inner_.hold(host_slots);
    TierCall& call = add("hold", host_slots);
    if (held) {
      call.hold = *held;
    } else {
      call.error = held.error();
    }
    return held;
  }
  void let_go(const HostHold& hold) override {
    inner_.let_go(hold);
    add("let_go").hold = hold;
  }
  Result<std::vector<std::uint64_t>> load(const HostHold& hold, std::span<const std::uint64_t> host_slots,
                                          std::int64_t node) override {
    return with_slots("load", inner_.load(hold, host_slots, node), host_slots, {}, node);
  }
  Result<std::vector<std::uint64_t>> adopt(std::span<const PrefixHash> pages) override {
    return with_slots("adopt", inner_.adopt(pages), {}, pages, kNoNode);
  }
  Outcome evict_device(std::span<const std::uint64_t> device_slots,
                       std::span<const std::uint64_t> host_slots) override {
    add("evict_device", device_slots).more_slots.assign(host_slots.begin(), host_slots.end());
    return inner_.evict_device(device_slots, host_slots);
  }
  [[nodiscard]] std::uint64_t host_available() const override {
    calls_.emplace_back();
    calls_.back().name = "host_available";
    return calls_.back().available = inner_.host_available();
  }
  Outcome evict_host(std::span<const std::uint64_t> host_slots) override {
    add("evict_host", host_slots);
    return inner_.evict_host(host_slots);
  }
  Outcome revive(std::span<const std::uint64_t> host_slots) override {
    add("revive", host_slots);
    return inner_.revive(host_slots);
  }

 private:
  TierCall& add(const char* name, std::span<const std::uint64_t> slots = {}) {
    calls_.emplace_back();
    calls_.back().name = name;
    calls_.back().slots.assign(slots.begin(), slots.end());
    return calls_.back();
  }
  Result<std::vector<std::uint64_t>> with_slots(const char* name, Result<std::vector<std::uint64_t>> answer,
                                                std::span<const std::uint64_t> slots,
                                                std::span<const PrefixHash> hashes, std::int64_t node) {
    TierCall& call = add(name, slots);
    call.hashes.assign(hashes.begin(), hashes.end());
    call.node = node;
    if (answer) {
      call.given = *answer;
    } else {
      call.error = answer.error();
    }
    return answer;
  }

  TreeTier& inner_;
  mutable std::deque<TierCall> calls_;
};

// Calls that are answered come in the order of the record. Those that only tell something may come in any:
// the order in which siblings are dropped is nobody's business.
class ReplayedTier : public TreeTier {
 public:
  explicit ReplayedTier(std::deque<TierCall>& calls) : calls_(calls) {}

  Result<std::vector<std::uint64_t>> write(std::span<const std::uint64_t> device_slots,
                                           std::span<const PrefixHash> chain, std::int64_t node) override {
    return slots_of(asked("write", device_slots, chain, node));
  }
  Result<std::vector<HiCacheAck>> finish_writes() override {
    TierCall call = asked("finish_writes");
    if (call.error) return *call.error;
    return std::move(call.acks);
  }
  Result<HostHold> hold(std::span<const std::uint64_t> host_slots) override {
    const TierCall call = asked("hold", host_slots);
    if (call.error) return *call.error;
    return call.hold;
  }
  void let_go(const HostHold& hold) override {
    if (asked("let_go").hold.sequence != hold.sequence) throw std::logic_error("another hold was let go");
  }
  Result<std::vector<std::uint64_t>> load(const HostHold&, std::span<const std::uint64_t> host_slots,
                                          std::int64_t node) override {
    return slots_of(asked("load", host_slots, {}, node));
  }
  Result<std::vector<std::uint64_t>> adopt(std::span<const PrefixHash> pages) override {
    return slots_of(asked("adopt", {}, pages));
  }
  Outcome evict_device(std::span<const std::uint64_t> device_slots,
                       std::span<const std::uint64_t> host_slots) override {
    return told("evict_device", device_slots, host_slots);
  }
  [[nodiscard]] std::uint64_t host_available() const override { return asked("host_available").available; }
  Outcome evict_host(std::span<const std::uint64_t> host_slots) override {
    return told("evict_host", host_slots);
  }
  Outcome revive(std::span<const std::uint64_t> host_slots) override { return told("revive", host_slots); }

 private:
  static bool only_tells(const TierCall& call) {
    return call.name == "evict_device" || call.name == "evict_host" || call.name == "revive";
  }
  static bool same(std::span<const std::uint64_t> a, const std::vector<std::uint64_t>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  }
  TierCall asked(const char* name, std::span<const std::uint64_t> slots = {},
                 std::span<const PrefixHash> hashes = {}, std::int64_t node = kNoNode) const {
    for (auto at = calls_.begin(); at != calls_.end(); ++at) {
      if (only_tells(*at)) continue;
      // A node that is new has no number yet.
      const bool right = at->name == name && same(slots, at->slots) &&
                         (node == kNoNode || node == at->node) &&
                         std::equal(hashes.begin(), hashes.end(), at->hashes.begin(), at->hashes.end());
      if (!right) throw std::logic_error(std::string("the model asks ") + name + ", the tree " + at->name);
      TierCall call = std::move(*at);
      calls_.erase(at);
      return call;
    }
    throw std::logic_error(std::string("the model asks ") + name + ", the tree nothing more");
  }
  Outcome told(const char* name, std::span<const std::uint64_t> slots,
               std::span<const std::uint64_t> more = {}) {
    for (auto at = calls_.begin(); at != calls_.end(); ++at) {
      if (at->name != name || !same(slots, at->slots) || !same(more, at->more_slots)) continue;
      calls_.erase(at);
      return success();
    }
    throw std::logic_error(std::string("only the model says ") + name);
  }
  static Result<std::vector<std::uint64_t>> slots_of(TierCall call) {
    if (call.error) return *call.error;
    return std::move(call.given);
  }

  std::deque<TierCall>& calls_;
};

}  // namespace hicache::test
