#include "tests/support/region_builder.hpp"

#include <algorithm>
#include <cstring>

#include "shm/flight_recorder.hpp"
#include "shm/namespace_spec.hpp"
#include "shm/prefix_index.hpp"
#include "shm/process.hpp"
#include "shm/protocol.hpp"

namespace hicache::test {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;
constexpr std::uint64_t kSegmentBytes = 64 * kKiB;

RegionPlan small_plan(std::size_t config_bytes) {
  RegionShape shape;
  shape.config_text_bytes = config_bytes;
  shape.namespaces = 4;
  shape.clients = 8;
  shape.groups = 4;
  shape.segments = 16;
  shape.index_buckets = 4;
  shape.pages = 64;
  shape.leases = 8;
  shape.pin_chunks = 16;
  shape.flight_records = 16;
  return plan_region(shape);
}

template <class Entry, class IsFree>
std::uint32_t first_free(std::span<Entry> table, IsFree is_free) {
  const auto at = std::find_if(table.begin(), table.end(), is_free);
  if (at == table.end()) throw std::bad_alloc();
  return static_cast<std::uint32_t>(at - table.begin());
}

template <class Enum>
std::uint32_t raw(Enum value) {
  return static_cast<std::uint32_t>(value);
}

bool is_free_state(const A32& state) {
  return state.load(kRelaxed) == 0;
}

}  // namespace

RegionBuilder::RegionBuilder(std::string_view config_text) : plan_(small_plan(config_text.size())) {
  bytes_.reset(static_cast<std::uint8_t*>(::operator new (plan_.total_bytes, std::align_val_t{4096})));
  std::memset(bytes_.get(), 0, plan_.total_bytes);
  tables_ = make_tables(static_cast<void*>(bytes_.get()), plan_);
  for (std::size_t i = 0; i < config_text.size(); ++i) {
    tables_.config_text[i].store(static_cast<std::uint8_t>(config_text[i]), kRelaxed);
  }
  for (IndexBucket& b : tables_.index) b.head.store(kNone32, kRelaxed);
  for (PageEntry& p : tables_.pages) {
    for (A32* field : {&p.namespace_id, &p.chain_next, &p.parent, &p.size_class, &p.filler_lease}) {
      field->store(kNone32, kRelaxed);
    }
  }
  for (SegmentEntry& s : tables_.segments) {
    s.size_class.store(kNone32, kRelaxed);
    s.span_head.store(kNone32, kRelaxed);
  }
  for (LeaseEntry& l : tables_.leases) l.first_chunk.store(kNone32, kRelaxed);
  for (PinChunk& c : tables_.pin_chunks) {
    c.next.store(kNone32, kRelaxed);
    c.lease.store(kNone32, kRelaxed);
  }
  for (ClientEntry& c : tables_.clients) {
    c.group.store(kNone32, kRelaxed);
    c.namespace_id.store(kNone32, kRelaxed);
  }

  RegionHeader& h = *tables_.header;
  h.magic.store(kRegionMagic, kRelaxed);
  h.layout_major.store(kLayoutMajor, kRelaxed);
  h.layout_minor.store(kLayoutMinor, kRelaxed);
  h.layout_fingerprint.store(layout_fingerprint(), kRelaxed);
  h.region_bytes.store(plan_.total_bytes, kRelaxed);
  h.pool_bytes.store(tables_.segments.size() * kSegmentBytes, kRelaxed);
  h.segment_bytes.store(kSegmentBytes, kRelaxed);
  h.instance_epoch.store(7, kRelaxed);
  h.hash_seed.store(0x1234, kRelaxed);
  h.section_count.store(kSectionCount, kRelaxed);
  store_text(h.name, "test");
  store_text(h.socket_path, "/run/test.sock");
  for (std::uint32_t i = 0; i < kSectionCount; ++i) {
    h.sections[i].kind.store(raw(plan_.sections[i].kind), kRelaxed);
    h.sections[i].entry_bytes.store(plan_.sections[i].entry_bytes, kRelaxed);
    h.sections[i].offset.store(plan_.sections[i].offset, kRelaxed);
    h.sections[i].entries.store(plan_.sections[i].entries, kRelaxed);
  }
  h.state.store(raw(RegionState::ready), kRelaxed);
  seal_header();
}

void RegionBuilder::seal_header() {
  tables_.header->header_crc.store(header_crc(*tables_.header), kRelaxed);
}

void RegionBuilder::adopt() {
  const ProcessIdentity self = ProcessIdentity::self();
  tables_.header->daemon_pid.store(self.pid, kRelaxed);
  tables_.header->daemon_start_ticks.store(self.start_ticks, kRelaxed);
  store_text(tables_.header->boot_id, boot_id());
  seal_header();
}

std::uint32_t RegionBuilder::add_namespace(std::uint32_t shards, std::uint64_t shard_bytes,
                                           std::string_view label) {
  const auto id =
      first_free(tables_.namespaces, [](const NamespaceEntry& e) { return is_free_state(e.state); });
  NamespaceEntry& e = tables_.namespaces[id];
  const std::uint64_t stride = align_up(shard_bytes, kPoolAlignment);
  auto size = std::find(slot_sizes_.begin(), slot_sizes_.end(), shards * stride);
  if (size == slot_sizes_.end()) size = slot_sizes_.insert(size, shards * stride);
  e.successor.store(kNone32, kRelaxed);
  for (std::size_t i = 0; i < 4; ++i) {
    e.digest[i].store(0x1000 + id, kRelaxed);
    e.base_digest[i].store(0x2000 + id, kRelaxed);
  }
  e.shard_bytes.store(shard_bytes, kRelaxed);
  e.shard_stride.store(stride, kRelaxed);
  e.slot_bytes.store(shards * stride, kRelaxed);
  e.shards.store(shards, kRelaxed);
  e.size_class.store(static_cast<std::uint32_t>(size - slot_sizes_.begin()), kRelaxed);
  e.page_tokens.store(64, kRelaxed);
  e.layers.store(2, kRelaxed);
  store_text(e.label, label);
  e.state.store(raw(NamespaceState::active), kRelaxed);
  return id;
}

std::uint32_t RegionBuilder::add_group(std::uint32_t ns, std::uint32_t tp_size, std::string_view engine) {
  const auto slot = first_free(tables_.groups, [](const GroupEntry& e) { return is_free_state(e.state); });
  GroupEntry& e = tables_.groups[slot];
  e.generation.store(1, kRelaxed);
  e.namespace_id.store(ns, kRelaxed);
  e.tp_size.store(tp_size, kRelaxed);
  e.scheduler.store(kNone32, kRelaxed);
  store_text(e.engine, engine);
  e.state.store(raw(GroupState::active), kRelaxed);
  return slot;
}

std::uint32_t RegionBuilder::add_client(std::uint32_t group, std::uint32_t role, std::uint32_t tp_rank) {
  const auto slot = first_free(tables_.clients, [](const ClientEntry& e) { return is_free_state(e.state); });
  ClientEntry& e = tables_.clients[slot];
  e.generation.store(1, kRelaxed);
  e.pid.store(1000 + slot, kRelaxed);
  e.role.store(role, kRelaxed);
  e.group.store(group, kRelaxed);
  e.namespace_id.store(tables_.groups[group].namespace_id.load(kRelaxed), kRelaxed);
  e.tp_rank.store(tp_rank, kRelaxed);
  e.sq_head.store(0xfffffff0u, kRelaxed);  // about to wrap
  e.sq_tail_seen.store(3, kRelaxed);
  e.cq_head_seen.store(9, kRelaxed);
  e.cq_tail.store(12, kRelaxed);
  e.state.store(raw(ClientState::attached), kRelaxed);
  return slot;
}

std::uint32_t RegionBuilder::add_rank(std::uint32_t group, std::uint32_t tp_rank) {
  const auto slot = add_client(group, raw(Role::rank), tp_rank);
  A64& members = tables_.groups[group].members_attached;
  members.store(members.load(kRelaxed) | (1ull << tp_rank), kRelaxed);
  return slot;
}

std::uint32_t RegionBuilder::add_scheduler(std::uint32_t group) {
  const auto slot = add_client(group, raw(Role::scheduler), 0);
  tables_.groups[group].scheduler.store(slot, kRelaxed);
  return slot;
}

// First fit: the next slot of an assigned span of the class, else a new span behind the last.
std::uint64_t RegionBuilder::take_slot(std::uint32_t size_class, std::uint64_t slot_bytes) {
  const auto segments = static_cast<std::uint32_t>(tables_.segments.size());
  const auto span = static_cast<std::uint32_t>(align_up(slot_bytes, kSegmentBytes) / kSegmentBytes);
  for (std::uint32_t i = 0; i < segments; ++i) {
    SegmentEntry& s = tables_.segments[i];
    if (s.size_class.load(kRelaxed) == kNone32) {
      if (i + span > segments) break;
      for (std::uint32_t k = i; k < i + span; ++k) {
        tables_.segments[k].size_class.store(size_class, kRelaxed);
        tables_.segments[k].span_head.store(i, kRelaxed);
      }
      s.span_segments.store(span, kRelaxed);
      s.slots.store(static_cast<std::uint32_t>(span * kSegmentBytes / slot_bytes), kRelaxed);
      s.slot_bytes.store(slot_bytes, kRelaxed);
    }
    const std::uint32_t used = s.used_slots.load(kRelaxed);
    if (s.span_head.load(kRelaxed) != i || s.size_class.load(kRelaxed) != size_class ||
        used == s.slots.load(kRelaxed)) {
      continue;
    }
    s.used_slots.store(used + 1, kRelaxed);
    return i * kSegmentBytes + used * slot_bytes;
  }
  throw std::bad_alloc();
}

std::uint32_t RegionBuilder::add_page(std::uint32_t ns, std::uint32_t parent, PageState state,
                                      std::uint32_t filler) {
  const auto id = first_free(tables_.pages, [](const PageEntry& e) {
    return PageWord::decode(e.word.load(kRelaxed)).state == PageState::free;
  });
  PageEntry& e = tables_.pages[id];
  const NamespaceEntry& space = tables_.namespaces[ns];
  const std::uint32_t size_class = space.size_class.load(kRelaxed);
  for (std::size_t i = 0; i < 4; ++i) e.key[i].store(0x9e3779b97f4a7c15ull * (next_key_ + i), kRelaxed);
  ++next_key_;
  e.namespace_id.store(ns, kRelaxed);
  e.size_class.store(size_class, kRelaxed);
  e.pool_offset.store(take_slot(size_class, space.slot_bytes.load(kRelaxed)), kRelaxed);
  e.filler_lease.store(filler, kRelaxed);
  if (state == PageState::ready) e.shards_done.store((1ull << space.shards.load(kRelaxed)) - 1, kRelaxed);
  if (parent != kNone32) {
    PageEntry& up = tables_.pages[parent];
    e.parent.store(parent, kRelaxed);
    e.parent_generation.store(PageWord::decode(up.word.load(kRelaxed)).generation.value, kRelaxed);
    e.depth.store(up.depth.load(kRelaxed) + 1, kRelaxed);
    up.children.fetch_add(1, kRelaxed);
  }
  e.word.store(PageWord{state, 0, 0, Generation{id + 1}}.encode(), kRelaxed);
  if (state == PageState::ready || state == PageState::filling) {
    IndexWriter index(tables_, tables_.header->hash_seed.load(kRelaxed));
    index.insert(PageId{id}, index.bucket_of(load_key(e), NamespaceId{ns}));
  }
  return id;
}

std::uint32_t RegionBuilder::add_lease(std::uint32_t group, const std::vector<std::uint32_t>& pages) {
  const auto slot = first_free(tables_.leases, [](const LeaseEntry& e) { return is_free_state(e.state); });
  LeaseEntry& e = tables_.leases[slot];
  GroupEntry& g = tables_.groups[group];
  e.generation.store(1, kRelaxed);
  e.group.store(group, kRelaxed);
  e.namespace_id.store(g.namespace_id.load(kRelaxed), kRelaxed);
  e.sequence.store(slot + 1, kRelaxed);
  e.holders.store(g.members_attached.load(kRelaxed), kRelaxed);
  e.pages.store(static_cast<std::uint32_t>(pages.size()), kRelaxed);
  e.first_chunk.store(kNone32, kRelaxed);
  e.pins.store(static_cast<std::uint32_t>(pages.size()), kRelaxed);
  e.state.store(raw(LeaseState::live), kRelaxed);
  g.leases.fetch_add(1, kRelaxed);
  for (std::size_t base = 0; base < pages.size(); base += PinChunk::kPages) {
    const auto id =
        first_free(tables_.pin_chunks, [](const PinChunk& c) { return c.lease.load(kRelaxed) == kNone32; });
    PinChunk& chunk = tables_.pin_chunks[id];
    const auto n = static_cast<std::uint32_t>(std::min<std::size_t>(PinChunk::kPages, pages.size() - base));
    for (std::uint32_t i = 0; i < n; ++i) chunk.pages[i].store(pages[base + i], kRelaxed);
    chunk.count.store(n, kRelaxed);
    chunk.lease.store(slot, kRelaxed);
    chunk.next.store(e.first_chunk.load(kRelaxed), kRelaxed);
    e.first_chunk.store(id, kRelaxed);
  }
  for (const std::uint32_t page : pages) {
    PageWord word = PageWord::decode(tables_.pages[page].word.load(kRelaxed));
    ++word.pins;
    tables_.pages[page].word.store(word.encode(), kRelaxed);
  }
  return slot;
}

void RegionBuilder::add_record(std::uint64_t sequence) {
  FlightNote note;
  note.time_ns = sequence * 1000;
  note.client = 0;
  note.opcode = static_cast<std::uint16_t>(Opcode::write);
  note.count = 3;
  FlightRecorder(tables_.flight).record(sequence, note);
}

void RegionBuilder::count() {
  std::uint64_t gauges[kCounterCount] = {};
  auto gauge = [&](Counter c) -> std::uint64_t& { return gauges[raw(c)]; };
  for (NamespaceEntry& ns : tables_.namespaces) {
    ns.resident_pages.store(0, kRelaxed);
    ns.attached_clients.store(0, kRelaxed);
  }
  for (const PageEntry& p : tables_.pages) {
    const PageWord word = PageWord::decode(p.word.load(kRelaxed));
    if (word.state == PageState::free) continue;
    ++gauge(Counter::resident_pages);
    gauge(Counter::ready_pages) += word.readable() ? 1 : 0;
    tables_.namespaces[p.namespace_id.load(kRelaxed)].resident_pages.fetch_add(1, kRelaxed);
  }
  for (const LeaseEntry& l : tables_.leases) {
    if (is_free_state(l.state)) continue;
    ++gauge(Counter::live_leases);
    gauge(Counter::pinned_pages) += l.pins.load(kRelaxed);
  }
  for (const SegmentEntry& s : tables_.segments) {
    if (s.size_class.load(kRelaxed) == kNone32) continue;
    ++gauge(Counter::assigned_segments);
    gauge(Counter::used_pool_bytes) += s.used_slots.load(kRelaxed) * s.slot_bytes.load(kRelaxed);
  }
  for (const ClientEntry& c : tables_.clients) {
    if (is_free_state(c.state)) continue;
    ++gauge(Counter::attached_clients);
    tables_.namespaces[c.namespace_id.load(kRelaxed)].attached_clients.fetch_add(1, kRelaxed);
  }
  for (std::uint32_t i = 0; i < kCounterCount; ++i) tables_.counters[i].store(gauges[i], kRelaxed);
}

RegionBuilder standard_region() {
  RegionBuilder b;
  const auto wide = b.add_namespace(4, 4000, "wide@1");
  const auto shared = b.add_namespace(1, 8192, "shared@1");
  const auto large = b.add_namespace(2, 70'000, "large@1");
  const auto first = b.add_group(wide, 4, "engine-a");
  const auto second = b.add_group(shared, 2, "engine-b");
  for (std::uint32_t rank = 0; rank < 4; ++rank) b.add_rank(first, rank);
  for (std::uint32_t rank = 0; rank < 2; ++rank) b.add_rank(second, rank);
  b.add_scheduler(second);
  const auto p0 = b.add_page(wide, kNone32, PageState::ready);
  const auto p1 = b.add_page(wide, p0, PageState::ready);
  const auto p2 = b.add_page(wide, p1, PageState::ready);
  b.add_page(wide, p0, PageState::ready);
  const auto p4 = b.add_page(wide, p2, PageState::filling, 0);
  const auto p5 = b.add_page(shared, kNone32, PageState::ready);
  b.add_page(shared, p5, PageState::ready);
  b.add_page(shared, kNone32, PageState::aborting);
  b.add_page(large, kNone32, PageState::ready);
  b.add_lease(first, {p0, p1, p2, p4});
  b.add_lease(second, {p5});
  for (std::uint64_t sequence = 1; sequence <= 20; ++sequence) b.add_record(sequence);
  b.count();
  return b;
}

}  // namespace hicache::test
