// Table entries as plain values with names and printable text: what the reports print.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "shm/host_page_state.hpp"
#include "tools/dump/snapshot.hpp"

namespace hicache::inspect {

// 64 hex digits.
std::string hex(const A64 (&words)[4]);

struct HeaderRow {
  std::uint32_t layout_major = 0, layout_minor = 0;
  std::uint64_t fingerprint = 0, region_bytes = 0, pool_bytes = 0, segment_bytes = 0, instance_epoch = 0;
  std::uint64_t created_unix_ns = 0, daemon_start_ticks = 0;
  std::uint32_t daemon_pid = 0;
  std::string boot_id, name, socket_path, state;
  std::uint64_t commit_sequence = 0, operation_sequence = 0, heartbeat_ns = 0, use_clock = 0;
};
HeaderRow decode_header(const RegionHeader& h);

struct NamespaceRow {
  std::uint32_t id = 0;
  std::string state, digest, base_digest, label;
  std::optional<std::uint32_t> successor;
  std::uint64_t weights_epoch = 0, shard_bytes = 0, shard_stride = 0, slot_bytes = 0;
  std::uint32_t shards = 0, size_class = 0, page_tokens = 0, layers = 0, attached_clients = 0;
  std::uint64_t resident_pages = 0, hits = 0, written = 0, evicted = 0;
};
// All but the free ones; so for the other tables below.
std::vector<NamespaceRow> decode_namespaces(const ConstTables& t);

struct ClientRow {
  std::uint32_t slot = 0, generation = 0, pid = 0, uid = 0, tp_rank = 0;
  std::string state, role, engine;
  std::optional<std::uint32_t> group, namespace_id;
  std::uint64_t attached_unix_ns = 0, device_pages = 0;
  std::uint32_t sq_head = 0, sq_tail_seen = 0, cq_tail = 0, cq_head_seen = 0;
  std::uint32_t operations_in_flight = 0, copies_in_flight = 0;
  std::uint64_t operations = 0, errors = 0, bytes_written = 0, bytes_loaded = 0, last_operation_ns = 0;
  std::uint64_t over_quota = 0;
  HostPageCounts host_pages;  // all zero: no controller
  bool maps_pool = false;     // io_backend kernel
};
// The first 16 digits of a page's key, from the first word of its hash.
std::string key_start(std::uint64_t word);
std::vector<ClientRow> decode_clients(const ConstTables& t);

struct GroupRow {
  std::uint32_t slot = 0, generation = 0, tp_size = 0, leases = 0;
  std::string state, engine;
  std::optional<std::uint32_t> namespace_id, scheduler;
  std::uint64_t members_attached = 0, operations = 0, divergences = 0;
};
std::vector<GroupRow> decode_groups(const ConstTables& t);

struct LeaseRow {
  std::uint32_t slot = 0, generation = 0, pages = 0, hits = 0, pins = 0;
  std::string state;
  std::optional<std::uint32_t> group, namespace_id;
  std::uint64_t sequence = 0, holders = 0;
};
std::vector<LeaseRow> decode_leases(const ConstTables& t);

struct PageRow {
  std::uint32_t id = 0, generation = 0, pins = 0;
  std::string state, flags, key;
  std::optional<std::uint32_t> namespace_id, parent, filler_lease;
  std::uint32_t children = 0, depth = 0, uses = 0, size_class = 0;
  std::uint64_t slot_bytes = 0, pool_offset = 0, shards_done = 0, last_use = 0;
  bool leased = false;  // kernels of a rank may write to it
};
// The page, or nothing when it is free.
std::optional<PageRow> decode_page(const ConstTables& t, std::uint32_t id);

struct OperationRow {
  std::uint64_t sequence = 0, time_ns = 0, lease = 0, user_data = 0;
  std::uint32_t client = 0, client_generation = 0, detail = 0, count = 0;
  std::string opcode, status, event;
};
struct Operations {
  std::vector<OperationRow> rows;  // oldest first
  std::uint64_t skipped = 0;       // torn or misplaced
};
Operations decode_operations(const ConstTables& t);

}  // namespace hicache::inspect
