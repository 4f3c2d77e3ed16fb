#include "tools/dump/decode.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "shm/page_word.hpp"
#include "shm/prefix_hash.hpp"
#include "shm/protocol.hpp"
#include "shm/status.hpp"

namespace hicache::inspect {
namespace {

std::optional<std::uint32_t> optional_id(const A32& field) {
  const std::uint32_t id = get(field);
  return id == kNone32 ? std::nullopt : std::optional(id);
}

std::string invalid(std::uint64_t value) {
  return fmt::format("invalid({})", value);
}

std::string region_state_text(std::uint32_t s) {
  static constexpr const char* kNames[] = {"empty", "initialising", "ready", "draining", "closed"};
  return s < std::size(kNames) ? kNames[s] : invalid(s);
}
std::string namespace_state_text(std::uint32_t s) {
  static constexpr const char* kNames[] = {"free", "active", "retired"};
  return s < std::size(kNames) ? kNames[s] : invalid(s);
}
std::string client_state_text(std::uint32_t s) {
  static constexpr const char* kNames[] = {"free", "attached", "dying"};
  return s < std::size(kNames) ? kNames[s] : invalid(s);
}
std::string group_state_text(std::uint32_t s) {
  static constexpr const char* kNames[] = {"free", "active", "broken"};
  return s < std::size(kNames) ? kNames[s] : invalid(s);
}
std::string lease_state_text(std::uint32_t s) {
  static constexpr const char* kNames[] = {"free", "live", "poisoned", "closing"};
  return s < std::size(kNames) ? kNames[s] : invalid(s);
}
std::string event_text(std::uint32_t e) {
  static constexpr const char* kNames[] = {"none",   "submit", "complete", "attach",
                                           "detach", "lost",   "control",  "refused_transition"};
  return e < std::size(kNames) ? kNames[e] : invalid(e);
}
std::string role_text(std::uint32_t r) {
  return r >= 1 && r <= 3 ? std::string(to_string(static_cast<Role>(r))) : invalid(r);
}

}  // namespace

std::string hex(const A64 (&words)[4]) {
  PrefixHash h;
  for (std::size_t i = 0; i < 4; ++i) h.words[i] = get(words[i]);
  return to_hex(h);
}

std::string key_start(std::uint64_t word) {
  PrefixHash h;
  h.words[0] = word;
  return to_hex(h).substr(0, 16);
}

HeaderRow decode_header(const RegionHeader& h) {
  HeaderRow r;
  r.layout_major = get(h.layout_major);
  r.layout_minor = get(h.layout_minor);
  r.fingerprint = get(h.layout_fingerprint);
  r.region_bytes = get(h.region_bytes);
  r.pool_bytes = get(h.pool_bytes);
  r.segment_bytes = get(h.segment_bytes);
  r.instance_epoch = get(h.instance_epoch);
  r.created_unix_ns = get(h.created_unix_ns);
  r.daemon_start_ticks = get(h.daemon_start_ticks);
  r.daemon_pid = get(h.daemon_pid);
  r.boot_id = load_text(h.boot_id);
  r.name = load_text(h.name);
  r.socket_path = load_text(h.socket_path);
  r.state = region_state_text(get(h.state));
  r.commit_sequence = get(h.commit_sequence);
  r.operation_sequence = get(h.operation_sequence);
  r.heartbeat_ns = get(h.heartbeat_ns);
  r.use_clock = get(h.use_clock);
  return r;
}

std::vector<NamespaceRow> decode_namespaces(const ConstTables& t) {
  std::vector<NamespaceRow> rows;
  for (std::uint32_t i = 0; i < t.namespaces.size(); ++i) {
    const NamespaceEntry& e = t.namespaces[i];
    if (get(e.state) == static_cast<std::uint32_t>(NamespaceState::free)) continue;
    NamespaceRow r;
    r.id = i;
    r.state = namespace_state_text(get(e.state));
    r.digest = hex(e.digest);
    r.base_digest = hex(e.base_digest);
    r.label = load_text(e.label);
    r.successor = optional_id(e.successor);
    r.weights_epoch = get(e.weights_epoch);
    r.shard_bytes = get(e.shard_bytes);
    r.shard_stride = get(e.shard_stride);
    r.slot_bytes = get(e.slot_bytes);
    r.shards = get(e.shards);
    r.size_class = get(e.size_class);
    r.page_tokens = get(e.page_tokens);
    r.layers = get(e.layers);
    r.attached_clients = get(e.attached_clients);
    r.resident_pages = get(e.resident_pages);
    r.hits = get(e.hits);
    r.written = get(e.written);
    r.evicted = get(e.evicted);
    rows.push_back(std::move(r));
  }
  return rows;
}

std::vector<ClientRow> decode_clients(const ConstTables& t) {
  std::vector<ClientRow> rows;
  for (std::uint32_t i = 0; i < t.clients.size(); ++i) {
    const ClientEntry& e = t.clients[i];
    if (get(e.state) == static_cast<std::uint32_t>(ClientState::free)) continue;
    ClientRow r;
    r.slot = i;
    r.generation = get(e.generation);
    r.pid = get(e.pid);
    r.uid = get(e.uid);
    r.tp_rank = get(e.tp_rank);
    r.state = client_state_text(get(e.state));
    r.role = role_text(get(e.role));
    r.engine = load_text(e.engine);
    r.group = optional_id(e.group);
    r.namespace_id = optional_id(e.namespace_id);
    r.attached_unix_ns = get(e.attached_unix_ns);
    r.device_pages = get(e.device_pages);
    r.sq_head = get(e.sq_head);
    r.sq_tail_seen = get(e.sq_tail_seen);
    r.cq_tail = get(e.cq_tail);
    r.cq_head_seen = get(e.cq_head_seen);
    r.operations_in_flight = get(e.operations_in_flight);
    r.copies_in_flight = get(e.copies_in_flight);
    r.operations = get(e.operations);
    r.errors = get(e.errors);
    r.over_quota = get(e.over_quota);
    r.bytes_written = get(e.bytes_written);
    r.bytes_loaded = get(e.bytes_loaded);
    r.last_operation_ns = get(e.last_operation_ns);
    for (std::size_t state = 0; state < kHostPageStates; ++state) {
      r.host_pages.pages[state] = get(e.host_pages[state]);
    }
    r.host_pages.refused = get(e.host_page_refusals);
    r.maps_pool = get(e.pool_tag) != 0;
    for (std::size_t n = 0; n < kShownHandles; ++n) {
      r.host_pages.handles[n] = HostHandle::decode(get(e.host_handles[n][0]), get(e.host_handles[n][1]));
    }
    rows.push_back(std::move(r));
  }
  return rows;
}

std::vector<GroupRow> decode_groups(const ConstTables& t) {
  std::vector<GroupRow> rows;
  for (std::uint32_t i = 0; i < t.groups.size(); ++i) {
    const GroupEntry& e = t.groups[i];
    if (get(e.state) == static_cast<std::uint32_t>(GroupState::free)) continue;
    GroupRow r;
    r.slot = i;
    r.generation = get(e.generation);
    r.tp_size = get(e.tp_size);
    r.leases = get(e.leases);
    r.state = group_state_text(get(e.state));
    r.engine = load_text(e.engine);
    r.namespace_id = optional_id(e.namespace_id);
    r.scheduler = optional_id(e.scheduler);
    r.members_attached = get(e.members_attached);
    r.operations = get(e.operations);
    r.divergences = get(e.divergences);
    rows.push_back(std::move(r));
  }
  return rows;
}

std::vector<LeaseRow> decode_leases(const ConstTables& t) {
  std::vector<LeaseRow> rows;
  for (std::uint32_t i = 0; i < t.leases.size(); ++i) {
    const LeaseEntry& e = t.leases[i];
    if (get(e.state) == static_cast<std::uint32_t>(LeaseState::free)) continue;
    LeaseRow r;
    r.slot = i;
    r.generation = get(e.generation);
    r.pages = get(e.pages);
    r.hits = get(e.hits);
    r.pins = get(e.pins);
    r.state = lease_state_text(get(e.state));
    r.group = optional_id(e.group);
    r.namespace_id = optional_id(e.namespace_id);
    r.sequence = get(e.sequence);
    r.holders = get(e.holders);
    rows.push_back(std::move(r));
  }
  return rows;
}

std::optional<PageRow> decode_page(const ConstTables& t, std::uint32_t id) {
  const PageEntry& e = t.pages[id];
  const PageWord word = PageWord::decode(get(e.word));
  if (word.state == PageState::free) return std::nullopt;
  PageRow r;
  r.id = id;
  r.generation = word.generation.value;
  r.pins = word.pins;
  r.state = static_cast<std::uint8_t>(word.state) < kPageStateCount
                ? std::string(to_string(word.state))
                : invalid(static_cast<std::uint8_t>(word.state));
  if ((word.flags & PageWord::kDirty) != 0) r.flags = "dirty";
  if ((word.flags & PageWord::kStoring) != 0) r.flags += r.flags.empty() ? "storing" : ",storing";
  if ((word.flags & PageWord::kStates) != 0) r.flags += r.flags.empty() ? "states" : ",states";
  if ((word.flags & PageWord::kQuarantined) != 0) r.flags = "quarantined";
  r.key = hex(e.key);
  r.namespace_id = optional_id(e.namespace_id);
  r.parent = optional_id(e.parent);
  r.filler_lease = optional_id(e.filler_lease);
  r.leased = get(e.leased_to) != 0;
  r.children = get(e.children);
  r.depth = get(e.depth);
  r.uses = get(e.uses);
  r.size_class = get(e.size_class);
  r.pool_offset = get(e.pool_offset);
  r.shards_done = get(e.shards_done);
  r.last_use = get(e.last_use);
  if (r.namespace_id && *r.namespace_id < t.namespaces.size()) {
    r.slot_bytes = get(t.namespaces[*r.namespace_id].slot_bytes);
  }
  return r;
}

Operations decode_operations(const ConstTables& t) {
  Operations out;
  const std::uint64_t n = t.flight.size();
  for (std::uint64_t i = 0; i < n; ++i) {
    const FlightRecord& e = t.flight[i];
    OperationRow r;
    r.sequence = get(e.sequence);
    r.time_ns = get(e.time_ns);
    if (r.sequence == 0) {
      out.skipped += r.time_ns != 0 ? 1 : 0;  // never used records are all zero
      continue;
    }
    // The writer puts record k at k modulo the (power of two) table size.
    if (r.sequence % n != i) {
      ++out.skipped;
      continue;
    }
    r.lease = get(e.lease);
    r.user_data = get(e.user_data);
    r.client = get(e.client);
    r.client_generation = get(e.client_generation);
    r.detail = get(e.detail);
    r.count = get(e.count);
    const std::uint16_t opcode = get(e.opcode);
    const std::uint16_t status = get(e.status);
    r.opcode = opcode < kOpcodeCount ? std::string(to_string(static_cast<Opcode>(opcode))) : invalid(opcode);
    r.status = status < kStatusCount ? std::string(to_string(static_cast<Status>(status))) : invalid(status);
    r.event = event_text(get(e.event));
    if (get(e.event) == static_cast<std::uint32_t>(FlightEvent::refused_transition)) {
      const auto refused = RefusedTransition::decode(r.user_data);
      r.opcode = to_string(refused.call);
      r.status = to_string(refused.state);
      r.detail = refused.page;
    }
    out.rows.push_back(std::move(r));
  }
  std::sort(out.rows.begin(), out.rows.end(),
            [](const OperationRow& a, const OperationRow& b) { return a.sequence < b.sequence; });
  return out;
}

}  // namespace hicache::inspect
