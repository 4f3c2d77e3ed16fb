#include "shm/region.hpp"

#include <algorithm>
#include <cctype>
#include <cstring>

#include "shm/channel_layout.hpp"
#include "shm/page_word.hpp"
#include "shm/protocol.hpp"

namespace hicache {
namespace {

// 64-bit FNV-1a: small, and stable across compilers, which is all a fingerprint and a header check need.
class Fnv {
 public:
  void add(std::uint64_t v) {
    for (int i = 0; i < 8; ++i) add_byte(static_cast<std::uint8_t>(v >> (8 * i)));
  }
  void add_byte(std::uint8_t b) { hash_ = (hash_ ^ b) * 0x100000001b3ull; }
  [[nodiscard]] std::uint64_t value() const { return hash_; }

 private:
  std::uint64_t hash_ = 0xcbf29ce484222325ull;
};

#define HICACHE_SHAPE(T) \
  f.add(sizeof(T));      \
  f.add(alignof(T))
#define HICACHE_FIELD(T, field) f.add(offsetof(T, field))

}  // namespace

std::uint32_t section_entry_bytes(SectionKind kind) {
  switch (kind) {
    case SectionKind::none:
      return 0;
    case SectionKind::config_text:
      return 1;
    case SectionKind::namespaces:
      return sizeof(NamespaceEntry);
    case SectionKind::clients:
      return sizeof(ClientEntry);
    case SectionKind::groups:
      return sizeof(GroupEntry);
    case SectionKind::segments:
      return sizeof(SegmentEntry);
    case SectionKind::index_buckets:
      return sizeof(IndexBucket);
    case SectionKind::pages:
      return sizeof(PageEntry);
    case SectionKind::leases:
      return sizeof(LeaseEntry);
    case SectionKind::pin_chunks:
      return sizeof(PinChunk);
    case SectionKind::counters:
      return sizeof(A64);
    case SectionKind::flight_recorder:
      return sizeof(FlightRecord);
    case SectionKind::checksums:
      return sizeof(A64);
  }
  return 0;
}

std::string_view to_string(SectionKind kind) {
  switch (kind) {
    case SectionKind::none:
      return "none";
    case SectionKind::config_text:
      return "config_text";
    case SectionKind::namespaces:
      return "namespaces";
    case SectionKind::clients:
      return "clients";
    case SectionKind::groups:
      return "groups";
    case SectionKind::segments:
      return "segments";
    case SectionKind::index_buckets:
      return "index_buckets";
    case SectionKind::pages:
      return "pages";
    case SectionKind::leases:
      return "leases";
    case SectionKind::pin_chunks:
      return "pin_chunks";
    case SectionKind::counters:
      return "counters";
    case SectionKind::flight_recorder:
      return "flight_recorder";
    case SectionKind::checksums:
      return "checksums";
  }
  return "unknown_section";
}

RegionPlan plan_region(const RegionShape& shape) {
  const std::uint64_t counts[kSectionCount] = {std::max<std::uint64_t>(shape.config_text_bytes, 1),
                                               shape.namespaces,
                                               shape.clients,
                                               shape.groups,
                                               shape.segments,
                                               shape.index_buckets,
                                               shape.pages,
                                               shape.leases,
                                               shape.pin_chunks,
                                               kCounterCount,
                                               shape.flight_records,
                                               std::max<std::uint64_t>(shape.checksums, 1)};
  RegionPlan plan;
  std::uint64_t offset = kHeaderBytes;
  for (std::uint32_t i = 0; i < kSectionCount; ++i) {
    const auto kind = static_cast<SectionKind>(i + 1);
    plan.sections[i] = SectionPlan{kind, section_entry_bytes(kind), offset, counts[i]};
    offset = align_up(offset + plan.sections[i].bytes(), 4096);
  }
  plan.total_bytes = offset;
  return plan;
}

std::uint64_t layout_fingerprint() {
  Fnv f;
  f.add(kLayoutMajor);
  f.add(kCacheLine);
  f.add(kPoolAlignment);
  f.add(kCounterCount);
  f.add(kPageStateCount);
  f.add(kStatusCount);
  f.add(kOpcodeCount);
  HICACHE_SHAPE(RegionHeader);
  HICACHE_FIELD(RegionHeader, boot_id);
  HICACHE_FIELD(RegionHeader, header_crc);
  HICACHE_FIELD(RegionHeader, sections);
  HICACHE_FIELD(RegionHeader, state);
  HICACHE_FIELD(RegionHeader, commit_sequence);
  HICACHE_FIELD(RegionHeader, use_clock);
  HICACHE_SHAPE(Section);
  HICACHE_SHAPE(NamespaceEntry);
  HICACHE_FIELD(NamespaceEntry, digest);
  HICACHE_FIELD(NamespaceEntry, shard_bytes);
  HICACHE_FIELD(NamespaceEntry, shards);
  HICACHE_FIELD(NamespaceEntry, resident_pages);
  HICACHE_FIELD(NamespaceEntry, bumps);
  HICACHE_FIELD(NamespaceEntry, label);
  HICACHE_SHAPE(ClientEntry);
  HICACHE_FIELD(ClientEntry, role);
  HICACHE_FIELD(ClientEntry, sq_head);
  HICACHE_FIELD(ClientEntry, operations);
  HICACHE_FIELD(ClientEntry, engine);
  HICACHE_FIELD(ClientEntry, pool_tag);
  HICACHE_FIELD(ClientEntry, host_handles);
  HICACHE_SHAPE(GroupEntry);
  HICACHE_FIELD(GroupEntry, members_attached);
  HICACHE_FIELD(GroupEntry, engine);
  HICACHE_SHAPE(SegmentEntry);
  HICACHE_FIELD(SegmentEntry, numa_node);
  HICACHE_FIELD(SegmentEntry, slot_bytes);
  HICACHE_SHAPE(IndexBucket);
  HICACHE_SHAPE(PageEntry);
  HICACHE_FIELD(PageEntry, key);
  HICACHE_FIELD(PageEntry, namespace_id);
  HICACHE_FIELD(PageEntry, chain_next);
  HICACHE_FIELD(PageEntry, pool_offset);
  HICACHE_FIELD(PageEntry, shards_done);
  HICACHE_FIELD(PageEntry, last_use);
  HICACHE_FIELD(PageEntry, seal);
  HICACHE_FIELD(PageEntry, leased_to);
  HICACHE_SHAPE(LeaseEntry);
  HICACHE_FIELD(LeaseEntry, sequence);
  HICACHE_FIELD(LeaseEntry, first_chunk);
  HICACHE_SHAPE(PinChunk);
  HICACHE_FIELD(PinChunk, pages);
  HICACHE_SHAPE(FlightRecord);
  HICACHE_FIELD(FlightRecord, opcode);
  HICACHE_FIELD(FlightRecord, event);
  HICACHE_SHAPE(RingEntry);
  HICACHE_SHAPE(ChannelHeader);
  HICACHE_FIELD(ChannelHeader, sq_tail);
  HICACHE_FIELD(ChannelHeader, cq_head);
  HICACHE_FIELD(ChannelHeader, sq_head);
  HICACHE_FIELD(ChannelHeader, cq_tail);
  HICACHE_FIELD(ChannelHeader, daemon_sleeping);
  HICACHE_FIELD(ChannelHeader, client_tripwire);
  HICACHE_FIELD(ChannelHeader, daemon_tripwire);
  HICACHE_FIELD(ChannelHeader, host_handles);
  HICACHE_SHAPE(FenceBlock);
  HICACHE_SHAPE(Submission);
  HICACHE_SHAPE(Completion);
  return f.value();
}

std::uint64_t header_crc(const RegionHeader& header) {
  Fnv f;
  f.add(header.magic.load(std::memory_order_relaxed));
  f.add(header.layout_major.load(std::memory_order_relaxed));
  f.add(header.layout_minor.load(std::memory_order_relaxed));
  f.add(header.layout_fingerprint.load(std::memory_order_relaxed));
  f.add(header.region_bytes.load(std::memory_order_relaxed));
  f.add(header.pool_bytes.load(std::memory_order_relaxed));
  f.add(header.segment_bytes.load(std::memory_order_relaxed));
  f.add(header.instance_epoch.load(std::memory_order_relaxed));
  f.add(header.created_unix_ns.load(std::memory_order_relaxed));
  f.add(header.hash_seed.load(std::memory_order_relaxed));
  f.add(header.daemon_start_ticks.load(std::memory_order_relaxed));
  f.add(header.daemon_pid.load(std::memory_order_relaxed));
  f.add(header.section_count.load(std::memory_order_relaxed));
  for (const A8& b : header.boot_id) f.add_byte(b.load(std::memory_order_relaxed));
  for (const A8& b : header.name) f.add_byte(b.load(std::memory_order_relaxed));
  for (const A8& b : header.socket_path) f.add_byte(b.load(std::memory_order_relaxed));
  for (const Section& s : header.sections) {
    f.add(s.kind.load(std::memory_order_relaxed));
    f.add(s.entry_bytes.load(std::memory_order_relaxed));
    f.add(s.offset.load(std::memory_order_relaxed));
    f.add(s.entries.load(std::memory_order_relaxed));
  }
  return f.value();
}

namespace {

template <bool Const, class Void>
BasicTables<Const> make_tables_at(Void* base, const RegionPlan& plan) {
  using Byte = std::conditional_t<Const, const std::uint8_t, std::uint8_t>;
  auto* bytes = static_cast<Byte*>(base);
  BasicTables<Const> t;
  auto bind = [&]<class T>(std::span<T>& span, SectionKind kind) {
    const SectionPlan& s = plan.section(kind);
    span = std::span<T>(reinterpret_cast<T*>(bytes + s.offset), s.entries);
  };
  t.header = reinterpret_cast<typename BasicTables<Const>::template Ptr<RegionHeader>*>(bytes);
  bind(t.config_text, SectionKind::config_text);
  bind(t.namespaces, SectionKind::namespaces);
  bind(t.clients, SectionKind::clients);
  bind(t.groups, SectionKind::groups);
  bind(t.segments, SectionKind::segments);
  bind(t.index, SectionKind::index_buckets);
  bind(t.pages, SectionKind::pages);
  bind(t.leases, SectionKind::leases);
  bind(t.pin_chunks, SectionKind::pin_chunks);
  bind(t.counters, SectionKind::counters);
  bind(t.flight, SectionKind::flight_recorder);
  bind(t.checksums, SectionKind::checksums);
  return t;
}

}  // namespace

Tables make_tables(void* base, const RegionPlan& plan) {
  return make_tables_at<false>(base, plan);
}
ConstTables make_tables(const void* base, const RegionPlan& plan) {
  return make_tables_at<true>(base, plan);
}

RegionCheck check_header(std::span<const std::uint8_t> header_bytes, std::uint64_t available_bytes) {
  RegionCheck check;
  auto fail = [&](RegionVerdict verdict, std::string text) {
    check.verdict = verdict;
    check.findings.push_back(std::move(text));
    return check;
  };
  if (header_bytes.size() < sizeof(RegionHeader)) {
    return fail(RegionVerdict::not_a_region, "damaged header: " + std::to_string(header_bytes.size()) +
                                                 " bytes, a region has at least 4096");
  }
  alignas(RegionHeader) std::uint8_t copy[sizeof(RegionHeader)];
  std::memcpy(copy, header_bytes.data(), sizeof copy);
  const auto& h = *reinterpret_cast<const RegionHeader*>(copy);
  auto get = [](const auto& a) { return a.load(std::memory_order_relaxed); };

  if (get(h.magic) != kRegionMagic) {
    const bool fresh =
        get(h.magic) == 0 && get(h.state) <= static_cast<std::uint32_t>(RegionState::initialising);
    return fail(fresh ? RegionVerdict::initialising : RegionVerdict::not_a_region,
                fresh ? "the region is being created" : "damaged header: wrong magic");
  }
  if (get(h.layout_major) != kLayoutMajor || get(h.layout_fingerprint) != layout_fingerprint()) {
    return fail(RegionVerdict::other_version,
                "layout " + std::to_string(get(h.layout_major)) + "." + std::to_string(get(h.layout_minor)) +
                    " fingerprint " + std::to_string(get(h.layout_fingerprint)) +
                    ", this build reads layout " + std::to_string(kLayoutMajor) + "." +
                    std::to_string(kLayoutMinor) + " fingerprint " + std::to_string(layout_fingerprint()));
  }
  if (get(h.state) < static_cast<std::uint32_t>(RegionState::ready)) {
    return fail(RegionVerdict::initialising, "the region is being created");
  }
  if (get(h.state) == static_cast<std::uint32_t>(RegionState::recovering)) {
    return fail(RegionVerdict::initialising, "a new daemon is taking the region over");
  }
  if (get(h.state) > static_cast<std::uint32_t>(RegionState::closed)) {
    return fail(RegionVerdict::damaged, "damaged header: state " + std::to_string(get(h.state)));
  }
  if (get(h.header_crc) != header_crc(h))
    return fail(RegionVerdict::damaged, "damaged header: checksum differs");
  if (get(h.region_bytes) > available_bytes) {
    return fail(RegionVerdict::damaged, "damaged header: region_bytes " +
                                            std::to_string(get(h.region_bytes)) + " but the object has " +
                                            std::to_string(available_bytes));
  }
  if (get(h.section_count) != kSectionCount) {
    return fail(RegionVerdict::damaged,
                "damaged header: " + std::to_string(get(h.section_count)) + " sections");
  }
  std::uint64_t end = kHeaderBytes;
  for (std::uint32_t i = 0; i < kSectionCount; ++i) {
    const Section& s = h.sections[i];
    const auto kind = static_cast<SectionKind>(i + 1);
    const SectionPlan plan{kind, get(s.entry_bytes), get(s.offset), get(s.entries)};
    const bool sane = get(s.kind) == i + 1 && plan.entry_bytes == section_entry_bytes(kind) &&
                      plan.offset % 4096 == 0 && plan.offset >= end && plan.offset <= get(h.region_bytes) &&
                      plan.entries < kNone32 &&
                      plan.entries <= (get(h.region_bytes) - plan.offset) / plan.entry_bytes;
    if (!sane) {
      return fail(RegionVerdict::damaged,
                  "damaged header: section " + std::string(to_string(kind)) + " does not fit the region");
    }
    end = plan.offset + plan.bytes();
    check.plan.sections[i] = plan;
  }
  const std::uint64_t buckets = check.plan.section(SectionKind::index_buckets).entries;
  if (buckets == 0 || (buckets & (buckets - 1)) != 0) {
    return fail(RegionVerdict::damaged, "damaged header: " + std::to_string(buckets) + " index buckets");
  }
  if (check.plan.section(SectionKind::counters).entries != kCounterCount) {
    return fail(RegionVerdict::damaged, "damaged header: counter table");
  }
  check.plan.total_bytes = get(h.region_bytes);
  check.verdict = RegionVerdict::usable;
  return check;
}

std::string control_object_name(std::string_view name) {
  return "hicache." + std::string(name) + ".control";
}
std::string pool_object_name(std::string_view name, unsigned pool) {
  return "hicache." + std::string(name) + ".pool" + std::to_string(pool);
}

bool valid_region_name(std::string_view name) {
  if (name.empty() || name.size() > 48 || name.front() == '.') return false;
  return std::all_of(name.begin(), name.end(), [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-';
  });
}

}  // namespace hicache
