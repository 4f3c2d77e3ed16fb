// What the segment format keeps on disk. docs/storage-file.md draws it; change both, and kDiskVersion.
//
// All integers are little-endian, all blocks 4 KiB. Everything that is read back is untrusted: a function
// check_... looks at a block and says nothing unless every field is what it must be.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "shm/status.hpp"
#include "shm/types.hpp"

namespace hicache::daemon {

constexpr std::uint32_t kDiskVersion = 1;
constexpr std::uint64_t kDiskBlock = 4 * kKiB;
static_assert(kDiskBlock == kPoolAlignment, "shards go from the pool to the disk as they lie");

// A page is known by its prefix hash and the digest of its namespace.
struct RecordKey {
  PrefixHash page;
  PrefixHash ns;
  friend bool operator==(const RecordKey&, const RecordKey&) = default;
};

// What a page consists of: shards of shard_bytes each, every one padded to whole blocks on the disk.
struct RecordShape {
  std::uint32_t shards = 0;
  std::uint64_t shard_bytes = 0;

  [[nodiscard]] std::uint64_t shard_stride() const { return align_up(shard_bytes, kDiskBlock); }
  [[nodiscard]] std::uint64_t payload_stride() const { return shards * shard_stride(); }
  // With its header.
  [[nodiscard]] std::uint64_t record_bytes() const { return kDiskBlock + payload_stride(); }
  // Bounds what is read from a disk, so that no product of the two can overflow.
  [[nodiscard]] bool plausible() const {
    return shards > 0 && shards <= 65536 && shard_bytes > 0 && shard_bytes <= kGiB;
  }
  friend bool operator==(const RecordShape&, const RecordShape&) = default;
};

// One page in a segment.
struct RecordInfo {
  RecordKey key;
  RecordShape shape;
  std::uint64_t offset = 0;      // of its header in the segment
  std::uint64_t generation = 0;  // grows with every record of a store: of two with one key, the later counts
  std::uint64_t payload_checksum = 0;
};

// A life of a segment file. `epoch` is random and stands in all that is written in that life, so that what an
// earlier life left behind, or a payload that looks like a record, is never taken for one.
struct SegmentIdentity {
  std::uint64_t epoch = 0;
  std::uint64_t sequence = 0;  // age: segments are evicted in this order
  std::uint64_t bytes = 0;     // of the file
};

// The superblock of a directory.
void make_superblock(std::span<std::byte> block, std::uint64_t created_unix_ns);
// version_mismatch for another version, corrupt for anything else; both say what was found.
Outcome check_superblock(std::span<const std::byte> block);

void make_segment_header(std::span<std::byte> block, const SegmentIdentity& segment);
std::optional<SegmentIdentity> check_segment_header(std::span<const std::byte> block);

void make_record_header(std::span<std::byte> block, std::uint64_t epoch, const RecordInfo& record);
// `offset` is where the block was found: a header that says another place is not one.
std::optional<RecordInfo> check_record_header(std::span<const std::byte> block, std::uint64_t epoch,
                                              std::uint64_t offset);

// The footer of a sealed segment: its records, then a trailer in the file's last block.
std::uint64_t footer_bytes(std::size_t records);  // whole blocks, without the trailer
void make_footer(std::span<std::byte> footer, std::span<const RecordInfo> records);
void make_trailer(std::span<std::byte> block, const SegmentIdentity& segment, std::size_t records,
                  std::span<const std::byte> footer);

struct TrailerInfo {
  std::size_t records = 0;
  std::uint64_t footer_offset = 0;
  std::uint64_t footer_checksum = 0;
};
// Nothing where the segment was not sealed in this life.
std::optional<TrailerInfo> check_trailer(std::span<const std::byte> block, const SegmentIdentity& segment);
// Nothing when the footer is damaged or a record does not lie between the header and the footer.
std::optional<std::vector<RecordInfo>> check_footer(std::span<const std::byte> footer,
                                                    const TrailerInfo& trailer);

}  // namespace hicache::daemon

template <>
struct std::hash<hicache::daemon::RecordKey> {
  std::size_t operator()(const hicache::daemon::RecordKey& key) const noexcept {
    return key.page.words[0] ^ key.ns.words[1];  // both are SHA-256
  }
};
