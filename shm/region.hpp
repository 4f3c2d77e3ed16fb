// The control region as typed tables: where each section lies, how a region is laid out, how one is checked
// before use.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "shm/counters.hpp"
#include "shm/region_layout.hpp"
#include "shm/status.hpp"

namespace hicache {

// Table sizes of a region; chosen from the configuration at creation.
struct RegionShape {
  std::uint64_t config_text_bytes = 0;
  std::uint32_t namespaces = 64;
  std::uint32_t clients = 64;
  std::uint32_t groups = 64;
  std::uint32_t segments = 0;
  std::uint32_t index_buckets = 0;  // power of two
  std::uint32_t pages = 0;
  std::uint32_t leases = 4096;
  std::uint32_t pin_chunks = 0;
  std::uint32_t flight_records = 4096;  // power of two
  std::uint64_t checksums = 1;          // one a 4 KiB line of the pool, or 1 when none are kept
};

// A section in private memory: what the tables below are built from.
struct SectionPlan {
  SectionKind kind = SectionKind::none;
  std::uint32_t entry_bytes = 0;
  std::uint64_t offset = 0;
  std::uint64_t entries = 0;
  [[nodiscard]] std::uint64_t bytes() const { return entries * entry_bytes; }
};

struct RegionPlan {
  std::array<SectionPlan, kSectionCount> sections;
  std::uint64_t total_bytes = 0;
  [[nodiscard]] const SectionPlan& section(SectionKind kind) const {
    return sections[static_cast<std::uint32_t>(kind) - 1];
  }
};

// Size in bytes of one entry of a section; 1 for text.
std::uint32_t section_entry_bytes(SectionKind kind);
std::string_view to_string(SectionKind kind);

// Lays the sections out behind the header, each at a 4 KiB line.
RegionPlan plan_region(const RegionShape& shape);

// Hash of every shared struct's size, alignment and field offsets, the cache line and the protocol constants
// that give bytes their meaning. Equal fingerprints mean both sides read the same bytes the same way.
std::uint64_t layout_fingerprint();

// CRC over the part of the header that never changes after creation, the section table included.
std::uint64_t header_crc(const RegionHeader& header);

// Typed pointers into a mapped region. `Const` picks read-only tables. Holds no ownership of the mapping. The
// spans are private copies of the section table: they are never re-read from shared memory.
template <bool Const>
struct BasicTables {
  template <class T>
  using Ptr = std::conditional_t<Const, const T, T>;

  Ptr<RegionHeader>* header = nullptr;
  std::span<Ptr<A8>> config_text;
  std::span<Ptr<NamespaceEntry>> namespaces;
  std::span<Ptr<ClientEntry>> clients;
  std::span<Ptr<GroupEntry>> groups;
  std::span<Ptr<SegmentEntry>> segments;
  std::span<Ptr<IndexBucket>> index;
  std::span<Ptr<PageEntry>> pages;
  std::span<Ptr<LeaseEntry>> leases;
  std::span<Ptr<PinChunk>> pin_chunks;
  std::span<Ptr<A64>> counters;
  std::span<Ptr<FlightRecord>> flight;
  std::span<Ptr<A64>> checksums;  // of the shard that begins at this 4 KiB line of the pool; 0 = none
};
using Tables = BasicTables<false>;
using ConstTables = BasicTables<true>;

// Builds the tables over `base`, which holds plan.total_bytes bytes.
Tables make_tables(void* base, const RegionPlan& plan);
ConstTables make_tables(const void* base, const RegionPlan& plan);

// Why a region can't be used; `findings` are sentences for a person.
enum class RegionVerdict { usable, not_a_region, other_version, initialising, damaged };
struct RegionCheck {
  RegionVerdict verdict = RegionVerdict::not_a_region;
  std::vector<std::string> findings;
  RegionPlan plan;
};
// Checks magic, versions, fingerprint, CRC and every section against `available_bytes`. `header_bytes` is a
// private copy of the first 4 KiB. Never reads past it, never trusts an offset it has not checked.
RegionCheck check_header(std::span<const std::uint8_t> header_bytes, std::uint64_t available_bytes);

// Names of the POSIX shared memory objects (without the leading slash) of the daemon called `name`.
std::string control_object_name(std::string_view name);
std::string pool_object_name(std::string_view name, unsigned pool);
// A daemon's name is 1 to 48 of [A-Za-z0-9._-], not starting with a dot.
bool valid_region_name(std::string_view name);

// Copies text in and out of a byte array in shared memory, always zero-terminated, cut when too long.
template <std::size_t N>
void store_text(A8 (&field)[N], std::string_view text) {
  for (std::size_t i = 0; i < N; ++i) {
    field[i].store(i < text.size() && i + 1 < N ? static_cast<std::uint8_t>(text[i]) : 0,
                   std::memory_order_relaxed);
  }
}
// Unprintable bytes become '?', so that a hostile region can't write to a terminal.
template <std::size_t N>
std::string load_text(const A8 (&field)[N]) {
  std::string out;
  for (std::size_t i = 0; i < N; ++i) {
    const auto c = field[i].load(std::memory_order_relaxed);
    if (c == 0) break;
    out.push_back(c >= 0x20 && c < 0x7f ? static_cast<char>(c) : '?');
  }
  return out;
}

}  // namespace hicache
