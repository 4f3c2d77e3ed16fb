#include <algorithm>
#include <array>
#include <map>
#include <vector>

#include "shm/namespace_spec.hpp"
#include "shm/protocol.hpp"
#include "tools/dump/checker.hpp"

namespace hicache::inspect {
namespace {

using Digest = std::array<std::uint64_t, 4>;

FindingId id_of(FindingKind kind, std::uint32_t index, std::int64_t difference = 0) {
  return {kind, SectionKind::namespaces, index, 0, difference};
}

void check_shape(const CheckContext& c, std::uint32_t i) {
  const NamespaceEntry& e = c.t.namespaces[i];
  const std::uint64_t shard_bytes = get(e.shard_bytes);
  const std::uint64_t stride = get(e.shard_stride);
  const std::uint32_t shards = get(e.shards);
  if (shard_bytes == 0 || shard_bytes > kMaxShardBytes || stride != align_up(shard_bytes, kPoolAlignment)) {
    c.out.add(id_of(FindingKind::broken_namespace, i, 1), Proof::structure,
              "namespace {} has shard stride {} for shards of {} bytes", i, stride, shard_bytes);
  }
  if (shards == 0 || shards > kMaxTpSize || get(e.slot_bytes) != shards * stride) {
    c.out.add(id_of(FindingKind::broken_namespace, i, 2), Proof::structure,
              "namespace {} has slots of {} bytes for {} shards of stride {}", i, get(e.slot_bytes), shards,
              stride);
  }
  const std::uint32_t layers = get(e.layers);
  if (get(e.page_tokens) == 0 || layers == 0 || layers > kMaxLayers) {
    c.out.add(id_of(FindingKind::broken_namespace, i, 3), Proof::structure,
              "namespace {} has {} tokens a page and {} layers", i, get(e.page_tokens), layers);
  }
  const std::uint32_t successor = get(e.successor);
  if (successor != kNone32 && (successor == i || c.used_namespace(successor) == nullptr)) {
    c.out.add(id_of(FindingKind::unknown_namespace, i, 4), Proof::structure,
              "namespace {} names namespace {} as its successor, which is not in use", i, successor);
  }
}

}  // namespace

void check_namespaces(const CheckContext& c) {
  std::map<Digest, std::uint32_t> active;
  std::map<std::uint32_t, std::uint32_t> first_of_class;
  std::vector<std::uint32_t> attached(c.t.namespaces.size());
  for (const ClientEntry& client : c.t.clients) {
    const std::uint32_t ns = get(client.namespace_id);
    if (get(client.state) == static_cast<std::uint32_t>(ClientState::attached) && ns < attached.size())
      ++attached[ns];
  }
  for (std::uint32_t i = 0; i < c.t.namespaces.size(); ++i) {
    const NamespaceEntry& e = c.t.namespaces[i];
    const std::uint32_t state = get(e.state);
    if (state == static_cast<std::uint32_t>(NamespaceState::free)) continue;
    if (state > static_cast<std::uint32_t>(NamespaceState::retired)) {
      c.out.add(id_of(FindingKind::wrong_state, i), Proof::structure,
                "namespace {} has state {}, expected 0 to 2", i, state);
    }
    check_shape(c, i);
    if (state == static_cast<std::uint32_t>(NamespaceState::active)) {
      Digest digest;
      for (std::size_t w = 0; w < digest.size(); ++w) digest[w] = get(e.digest[w]);
      const auto [it, fresh] = active.emplace(digest, i);
      if (!fresh) {
        c.out.add(id_of(FindingKind::duplicate_namespace, i), Proof::structure,
                  "namespaces {} and {} are both active with the same digest", it->second, i);
      }
    }
    const auto [it, fresh] = first_of_class.emplace(get(e.size_class), i);
    if (get(e.size_class) == kNone32) {
      c.out.add(id_of(FindingKind::wrong_size_class, i, 1), Proof::structure,
                "namespace {} has no size class", i);
    } else if (!fresh && get(c.t.namespaces[it->second].slot_bytes) != get(e.slot_bytes)) {
      c.out.add(id_of(FindingKind::wrong_size_class, i, 2), Proof::structure,
                "namespaces {} and {} share size class {} but have slots of {} and {} bytes", it->second, i,
                it->first, get(c.t.namespaces[it->second].slot_bytes), get(e.slot_bytes));
    }
    const std::int64_t difference = std::int64_t{get(e.attached_clients)} - attached[i];
    if (difference != 0) {
      c.out.add(id_of(FindingKind::wrong_count, i, difference), Proof::count,
                "namespace {} counts {} attached clients, the client table has {}", i,
                get(e.attached_clients), attached[i]);
    }
  }
}

}  // namespace hicache::inspect
