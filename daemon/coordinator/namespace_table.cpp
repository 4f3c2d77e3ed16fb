#include "daemon/coordinator/namespace_table.hpp"

#include <algorithm>
#include <cassert>

#include "shm/crash_points.hpp"
#include "shm/prefix_hash.hpp"

namespace hicache::daemon {
namespace {
constexpr auto kRelaxed = std::memory_order_relaxed;

void store_hash(A64 (&field)[4], const PrefixHash& hash) {
  for (std::size_t i = 0; i < 4; ++i) field[i].store(hash.words[i], kRelaxed);
}
PrefixHash load_hash(const A64 (&field)[4]) {
  PrefixHash hash;
  for (std::size_t i = 0; i < 4; ++i) hash.words[i] = field[i].load(kRelaxed);
  return hash;
}
}  // namespace

NamespaceTable::NamespaceTable(std::span<NamespaceEntry> entries, SlotAllocator& slots,
                               const std::vector<bool>* sound)
    : entries_(entries),
      slots_(slots),
      namespaces_(entries.size()),
      holds_(entries.size()),
      last_held_(entries.size()) {
  for (std::uint32_t i = 0; i < entries_.size(); ++i) {
    if (sound != nullptr && (*sound)[i]) {
      take_over(NamespaceId{i});
    } else {
      entries_[i].state.store(static_cast<std::uint32_t>(NamespaceState::free), kRelaxed);
    }
  }
  for (std::uint32_t i = 0; i < entries_.size(); ++i) {
    const std::uint32_t successor = entries_[i].successor.load(kRelaxed);
    if (successor >= entries_.size() || successor == i || !namespaces_[successor])
      entries_[i].successor.store(kNone32, kRelaxed);
  }
}

// Only digests and sizes survive a daemon. The spec comes back with the first engine that has the digest.
void NamespaceTable::take_over(NamespaceId id) {
  NamespaceEntry& e = entries_[id.value];
  Namespace ns;
  ns.id = id;
  ns.digest = load_hash(e.digest);
  ns.base_digest = load_hash(e.base_digest);
  ns.size_class = slots_.class_for(e.slot_bytes.load(kRelaxed));
  ns.spec_known = false;
  e.size_class.store(ns.size_class.value, kRelaxed);
  e.attached_clients.store(0, kRelaxed);
  if (const std::uint64_t bumps = e.bumps.load(kRelaxed); bumps > 0) {
    std::uint64_t& known = bumps_[ns.base_digest];
    known = std::max(known, bumps);
  }
  namespaces_[id.value] = std::move(ns);
}

bool NamespaceTable::agrees(NamespaceId id, const NamespaceSpec& spec) const {
  const NamespaceEntry& e = entries_[id.value];
  return e.shard_bytes.load(kRelaxed) == spec.shard_bytes() &&
         e.shard_stride.load(kRelaxed) == spec.shard_stride() &&
         e.slot_bytes.load(kRelaxed) == spec.slot_bytes() && e.shards.load(kRelaxed) == spec.shards() &&
         e.page_tokens.load(kRelaxed) == spec.page_tokens && e.layers.load(kRelaxed) == spec.layers;
}

std::optional<NamespaceId> NamespaceTable::free_entry() {
  for (int round = 0; round < 3; ++round) {
    for (std::uint32_t i = 0; i < namespaces_.size(); ++i) {
      if (!namespaces_[i]) return NamespaceId{i};
    }
    collect(round > 0);
  }
  return std::nullopt;
}

Result<NamespaceId> NamespaceTable::find_or_create(NamespaceSpec spec) {
  const PrefixHash base = spec.base_digest();
  if (const auto found = bumps_.find(base); found != bumps_.end()) spec.weights_epoch += found->second;
  const PrefixHash digest = spec.digest();
  for (std::uint32_t i = 0; i < namespaces_.size(); ++i) {
    if (!namespaces_[i] || namespaces_[i]->digest != digest || retired(NamespaceId{i})) continue;
    if (!namespaces_[i]->spec_known) {
      if (!agrees(NamespaceId{i}, spec)) {
        // A damaged entry: nothing of it may be served under this digest.
        entries_[i].state.store(static_cast<std::uint32_t>(NamespaceState::retired),
                                std::memory_order_release);
        continue;
      }
      namespaces_[i]->spec = spec;
      namespaces_[i]->spec_known = true;
    }
    return NamespaceId{i};
  }
  const SizeClassId size_class = slots_.class_for(spec.slot_bytes());
  if (!size_class) {
    return Error{Status::too_large,
                 "a page of " + std::to_string(spec.slot_bytes()) + " bytes (" +
                     std::to_string(spec.shards()) + " shards) is larger than the pool or than 1 GiB",
                 0};
  }
  const auto id = free_entry();
  if (!id) {
    return Error{
        Status::again,
        "all " + std::to_string(namespaces_.size()) + " namespaces are in use: raise limits.namespaces", 0};
  }
  Namespace ns{*id, spec, digest, base, size_class, true};
  NamespaceEntry& e = entries_[id->value];
  e.successor.store(kNone32, kRelaxed);
  store_hash(e.digest, digest);
  store_hash(e.base_digest, base);
  e.weights_epoch.store(spec.weights_epoch, kRelaxed);
  e.shard_bytes.store(spec.shard_bytes(), kRelaxed);
  e.shard_stride.store(spec.shard_stride(), kRelaxed);
  e.slot_bytes.store(spec.slot_bytes(), kRelaxed);
  e.shards.store(spec.shards(), kRelaxed);
  e.size_class.store(size_class.value, kRelaxed);
  e.page_tokens.store(spec.page_tokens, kRelaxed);
  e.layers.store(spec.layers, kRelaxed);
  e.resident_pages.store(0, kRelaxed);
  e.hits.store(0, kRelaxed);
  e.written.store(0, kRelaxed);
  e.evicted.store(0, kRelaxed);
  e.attached_clients.store(0, kRelaxed);
  const auto bumped = bumps_.find(base);
  e.bumps.store(bumped == bumps_.end() ? 0 : static_cast<std::uint32_t>(bumped->second), kRelaxed);
  store_text(e.label, spec.revision.empty() ? spec.model : spec.model + "@" + spec.revision);
  e.state.store(static_cast<std::uint32_t>(NamespaceState::active), std::memory_order_release);
  namespaces_[id->value] = std::move(ns);
  last_held_[id->value] = 0;
  return *id;
}

Result<std::vector<NamespaceId>> NamespaceTable::bump(const std::string& hex_prefix) {
  if (hex_prefix.size() < 8) {
    return Error{Status::invalid_argument,
                 "namespace '" + hex_prefix + "': give at least 8 hex digits of its base digest", 0};
  }
  std::vector<NamespaceId> matched;
  for (std::uint32_t i = 0; i < namespaces_.size(); ++i) {
    if (namespaces_[i] && !retired(NamespaceId{i}) &&
        to_hex(namespaces_[i]->base_digest).starts_with(hex_prefix)) {
      matched.push_back(NamespaceId{i});
    }
  }
  if (matched.empty()) {
    return Error{Status::not_found, "no namespace has a base digest that starts with '" + hex_prefix + "'",
                 0};
  }
  const PrefixHash base = get(matched.front()).base_digest;
  for (const NamespaceId id : matched) {
    if (get(id).base_digest != base) {
      return Error{Status::invalid_argument,
                   "'" + hex_prefix + "' names several namespaces: give more digits", 0};
    }
  }
  const auto set_state = [&](NamespaceState state) {
    for (const NamespaceId id : matched) {
      entries_[id.value].state.store(static_cast<std::uint32_t>(state), std::memory_order_release);
    }
  };
  ++bumps_[base];
  set_state(NamespaceState::retired);
  HICACHE_CRASH_POINT(bump_retired);
  // The search for a free entry must not take one of those that are being replaced.
  for (const NamespaceId id : matched) hold(id);
  std::vector<NamespaceId> successors;
  Error failure;
  for (const NamespaceId id : matched) {
    // No engine has attached since the takeover: the first one makes the successor.
    if (!get(id).spec_known) {
      successors.push_back(NamespaceId::none());
      continue;
    }
    // Engines of one model may have started with different epochs: each gets the successor of its own.
    NamespaceSpec next = get(id).spec;
    next.weights_epoch = next.weights_epoch + 1 - bumps_[base];  // find_or_create adds the bumps again
    const auto successor = find_or_create(next);
    if (!successor) {
      failure = successor.error();
      break;
    }
    hold(*successor);
    successors.push_back(*successor);
  }
  for (const NamespaceId id : matched) drop(id);
  for (const NamespaceId id : successors) {
    if (id) drop(id);
  }
  if (successors.size() == matched.size()) {
    for (std::size_t i = 0; i < matched.size(); ++i) {
      // A restart must not forget the bump, even where no successor was made.
      entries_[matched[i].value].bumps.store(static_cast<std::uint32_t>(bumps_[base]), kRelaxed);
      entries_[matched[i].value].successor.store(successors[i].value, std::memory_order_release);
    }
    return matched;
  }
  // All or nothing: an engine that stayed behind would go on with pages of the old weights.
  for (const NamespaceId id : successors) {
    if (id) free(id);
  }
  set_state(NamespaceState::active);
  --bumps_[base];
  return failure;
}

void NamespaceTable::free(NamespaceId id) {
  entries_[id.value].state.store(static_cast<std::uint32_t>(NamespaceState::free), kRelaxed);
  namespaces_[id.value].reset();
}

void NamespaceTable::drop(NamespaceId id) {
  assert(holds_[id.value] > 0);
  --holds_[id.value];
  last_held_[id.value] = ++holds_ever_;
}

bool NamespaceTable::last_to_know_bumps(NamespaceId id) const {
  const std::uint32_t bumps = entries_[id.value].bumps.load(kRelaxed);
  if (bumps == 0) return false;
  for (std::uint32_t i = 0; i < namespaces_.size(); ++i) {
    if (i != id.value && namespaces_[i] && namespaces_[i]->base_digest == get(id).base_digest &&
        entries_[i].bumps.load(kRelaxed) >= bumps)
      return false;
  }
  return true;
}

std::optional<NamespaceId> NamespaceTable::longest_idle() const {
  std::optional<NamespaceId> idle;
  for (std::uint32_t i = 0; i < namespaces_.size(); ++i) {
    if (!namespaces_[i] || holds_[i] != 0 || retired(NamespaceId{i}) || last_to_know_bumps(NamespaceId{i}))
      continue;
    if (!idle || last_held_[i] < last_held_[idle->value]) idle = NamespaceId{i};
  }
  return idle;
}

void NamespaceTable::retire(NamespaceId id) {
  assert(known(id) && holds_[id.value] == 0 && !retired(id));
  entries_[id.value].state.store(static_cast<std::uint32_t>(NamespaceState::retired),
                                 std::memory_order_release);
}

void NamespaceTable::collect(bool active_too) {
  for (std::uint32_t i = 0; i < namespaces_.size(); ++i) {
    NamespaceEntry& e = entries_[i];
    if (!namespaces_[i] || e.resident_pages.load(kRelaxed) != 0 || holds_[i] != 0) continue;
    if (!active_too && !retired(NamespaceId{i})) continue;
    if (last_to_know_bumps(NamespaceId{i})) continue;
    free(NamespaceId{i});
  }
}

}  // namespace hicache::daemon
