#include "daemon/storage/file/disk_format.hpp"

#include <array>
#include <cassert>
#include <cstring>
#include <type_traits>

#include "daemon/integrity/payload_checksum.hpp"

namespace hicache::daemon {
namespace {

using Magic = std::array<char, 8>;
constexpr Magic kSuperblockMagic = {'H', 'I', 'C', 'S', 'U', 'P', 'E', 'R'};
constexpr Magic kSegmentMagic = {'H', 'I', 'C', 'S', 'E', 'G', 'M', 'T'};
constexpr Magic kRecordMagic = {'H', 'I', 'C', 'R', 'E', 'C', 'R', 'D'};
constexpr Magic kTrailerMagic = {'H', 'I', 'C', 'F', 'O', 'O', 'T', 'R'};
constexpr std::uint32_t kChecksumXxh3 = 1;

// Each block begins with magic and version, and its last field is the checksum of all fields before it.
struct SuperblockFields {
  Magic magic;
  std::uint32_t version;
  std::uint32_t checksum_kind;
  std::uint64_t created_unix_ns;
  std::uint64_t checksum;
};
struct SegmentFields {
  Magic magic;
  std::uint32_t version;
  std::uint32_t reserved;
  std::uint64_t epoch;
  std::uint64_t sequence;
  std::uint64_t segment_bytes;
  std::uint64_t checksum;
};
struct RecordFields {
  Magic magic;
  std::uint32_t version;
  std::uint32_t shards;
  std::uint64_t shard_bytes;
  std::uint64_t epoch;
  std::uint64_t offset;
  std::uint64_t generation;
  PrefixHash page;
  PrefixHash ns;
  std::uint64_t payload_checksum;
  std::uint64_t checksum;
};
struct TrailerFields {
  Magic magic;
  std::uint32_t version;
  std::uint32_t records;
  std::uint64_t epoch;
  std::uint64_t footer_offset;
  std::uint64_t footer_checksum;
  std::uint64_t checksum;
};
struct FooterEntry {
  PrefixHash page;
  PrefixHash ns;
  std::uint64_t offset;
  std::uint64_t generation;
  std::uint64_t shard_bytes;
  std::uint32_t shards;
  std::uint32_t reserved;
  std::uint64_t payload_checksum;
};
static_assert(sizeof(SuperblockFields) == 32 && sizeof(SegmentFields) == 48 && sizeof(RecordFields) == 128 &&
              sizeof(TrailerFields) == 48 && sizeof(FooterEntry) == 104);

template <class Fields>
std::uint64_t fields_checksum(const Fields& fields) {
  static_assert(std::has_unique_object_representations_v<Fields>, "padding would be hashed");
  return payload_checksum(std::as_bytes(std::span(&fields, 1)).first(offsetof(Fields, checksum)));
}

template <class Fields>
void store(std::span<std::byte> block, Fields fields) {
  assert(block.size() == kDiskBlock);
  fields.checksum = fields_checksum(fields);
  std::memset(block.data(), 0, block.size());
  std::memcpy(block.data(), &fields, sizeof fields);
}

template <class Fields>
std::optional<Fields> load(std::span<const std::byte> block, const Magic& magic) {
  if (block.size() < sizeof(Fields)) return std::nullopt;
  Fields fields;
  std::memcpy(&fields, block.data(), sizeof fields);
  if (fields.magic != magic || fields.version != kDiskVersion) return std::nullopt;
  if (fields.checksum != fields_checksum(fields)) return std::nullopt;
  return fields;
}

// Whether a record of that shape can lie at `offset` of a segment whose records end before `end`.
bool fits(const RecordShape& shape, std::uint64_t offset, std::uint64_t end) {
  return shape.plausible() && offset >= kDiskBlock && offset % kDiskBlock == 0 && offset < end &&
         shape.record_bytes() <= end - offset;
}

}  // namespace

void make_superblock(std::span<std::byte> block, std::uint64_t created_unix_ns) {
  store(block, SuperblockFields{kSuperblockMagic, kDiskVersion, kChecksumXxh3, created_unix_ns, 0});
}

Outcome check_superblock(std::span<const std::byte> block) {
  SuperblockFields fields{};
  if (block.size() < sizeof fields) {
    return Error{Status::corrupt, "it has " + std::to_string(block.size()) + " bytes", 0};
  }
  std::memcpy(&fields, block.data(), sizeof fields);
  if (fields.magic != kSuperblockMagic) return Error{Status::corrupt, "it does not begin as one", 0};
  // A later version may put its checksum elsewhere, so the version is looked at first.
  if (fields.version != kDiskVersion) {
    return Error{Status::version_mismatch,
                 "it has format version " + std::to_string(fields.version) + ", this build knows " +
                     std::to_string(kDiskVersion),
                 0};
  }
  if (fields.checksum != fields_checksum(fields)) return Error{Status::corrupt, "its checksum is wrong", 0};
  if (fields.checksum_kind != kChecksumXxh3) {
    return Error{Status::version_mismatch,
                 "its checksums are of kind " + std::to_string(fields.checksum_kind) + ", this build has " +
                     std::to_string(kChecksumXxh3) + " (XXH3)",
                 0};
  }
  return success();
}

void make_segment_header(std::span<std::byte> block, const SegmentIdentity& segment) {
  store(block,
        SegmentFields{kSegmentMagic, kDiskVersion, 0, segment.epoch, segment.sequence, segment.bytes, 0});
}

std::optional<SegmentIdentity> check_segment_header(std::span<const std::byte> block) {
  const auto fields = load<SegmentFields>(block, kSegmentMagic);
  if (!fields) return std::nullopt;
  if (fields->segment_bytes % kDiskBlock != 0 || fields->segment_bytes < 4 * kDiskBlock) return std::nullopt;
  return SegmentIdentity{fields->epoch, fields->sequence, fields->segment_bytes};
}

void make_record_header(std::span<std::byte> block, std::uint64_t epoch, const RecordInfo& record) {
  store(block, RecordFields{kRecordMagic, kDiskVersion, record.shape.shards, record.shape.shard_bytes, epoch,
                            record.offset, record.generation, record.key.page, record.key.ns,
                            record.payload_checksum, 0});
}

std::optional<RecordInfo> check_record_header(std::span<const std::byte> block, std::uint64_t epoch,
                                              std::uint64_t offset) {
  const auto fields = load<RecordFields>(block, kRecordMagic);
  if (!fields || fields->epoch != epoch || fields->offset != offset) return std::nullopt;
  const RecordShape shape{fields->shards, fields->shard_bytes};
  if (!shape.plausible()) return std::nullopt;
  return RecordInfo{{fields->page, fields->ns}, shape, offset, fields->generation, fields->payload_checksum};
}

std::uint64_t footer_bytes(std::size_t records) {
  return align_up(records * sizeof(FooterEntry), kDiskBlock);
}

void make_footer(std::span<std::byte> footer, std::span<const RecordInfo> records) {
  assert(footer.size() == footer_bytes(records.size()));
  if (footer.empty()) return;
  std::memset(footer.data(), 0, footer.size());
  for (std::size_t i = 0; i < records.size(); ++i) {
    const RecordInfo& r = records[i];
    const FooterEntry entry{r.key.page,          r.key.ns,       r.offset, r.generation,
                            r.shape.shard_bytes, r.shape.shards, 0,        r.payload_checksum};
    std::memcpy(footer.data() + i * sizeof entry, &entry, sizeof entry);
  }
}

void make_trailer(std::span<std::byte> block, const SegmentIdentity& segment, std::size_t records,
                  std::span<const std::byte> footer) {
  store(block, TrailerFields{kTrailerMagic, kDiskVersion, static_cast<std::uint32_t>(records), segment.epoch,
                             segment.bytes - kDiskBlock - footer.size(), payload_checksum(footer), 0});
}

std::optional<TrailerInfo> check_trailer(std::span<const std::byte> block, const SegmentIdentity& segment) {
  const auto fields = load<TrailerFields>(block, kTrailerMagic);
  if (!fields || fields->epoch != segment.epoch) return std::nullopt;
  const std::uint64_t bytes = footer_bytes(fields->records);
  if (bytes > segment.bytes - 2 * kDiskBlock) return std::nullopt;
  if (fields->footer_offset != segment.bytes - kDiskBlock - bytes) return std::nullopt;
  return TrailerInfo{fields->records, fields->footer_offset, fields->footer_checksum};
}

std::optional<std::vector<RecordInfo>> check_footer(std::span<const std::byte> footer,
                                                    const TrailerInfo& trailer) {
  if (footer.size() != footer_bytes(trailer.records)) return std::nullopt;
  if (payload_checksum(footer) != trailer.footer_checksum) return std::nullopt;
  std::vector<RecordInfo> records;
  records.reserve(trailer.records);
  for (std::size_t i = 0; i < trailer.records; ++i) {
    FooterEntry entry;
    std::memcpy(&entry, footer.data() + i * sizeof entry, sizeof entry);
    const RecordShape shape{entry.shards, entry.shard_bytes};
    if (!fits(shape, entry.offset, trailer.footer_offset)) return std::nullopt;
    records.push_back(
        {{entry.page, entry.ns}, shape, entry.offset, entry.generation, entry.payload_checksum});
  }
  return records;
}

}  // namespace hicache::daemon
