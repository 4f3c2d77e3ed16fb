// What a Redis value of ours holds: a header that says whose page it is, then the payload of every shard in
// shard order, without padding.
//
// One value is a whole logical page. A page is used or lost as one thing: with a value a shard, the server
// could evict one of them and keep the others, and every question about a page would be as many commands.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "daemon/storage/backend.hpp"
#include "shm/types.hpp"

namespace hicache::daemon::redis {

// Little-endian, as it lies in the value.
struct RecordHeader {
  static constexpr std::uint64_t kMagic = 0x3144'5245'4843'4948ull;  // "HICHERD1"
  static constexpr std::uint32_t kVersion = 1;

  std::uint64_t magic = kMagic;
  std::uint32_t version = kVersion;
  std::uint32_t header_bytes = 0;
  PrefixHash key;                   // of the page
  PrefixHash ns;                    // digest of its namespace
  std::uint64_t payload_bytes = 0;  // of all shards
  std::uint32_t shards = 0;
  std::uint32_t reserved = 0;
  std::uint64_t payload_checksum = 0;  // XXH3-64
  std::uint64_t header_checksum = 0;   // XXH3-64 of everything before it
};
static_assert(sizeof(RecordHeader) == 112 && std::has_unique_object_representations_v<RecordHeader>);

// Bytes of a server's value at most (proto-max-bulk-len of Redis).
constexpr std::uint64_t kMaxValueBytes = 512 * kMiB;

// What a record of a page must say.
struct RecordIdentity {
  PrefixHash key;
  PrefixHash ns;
  std::uint64_t payload_bytes = 0;
  std::uint32_t shards = 0;

  RecordIdentity(const StorageNamespace& of, const PrefixHash& page)
      : key(page),
        ns(of.digest),
        payload_bytes(of.spec.shard_bytes() * of.spec.shards()),
        shards(of.spec.shards()) {}
  [[nodiscard]] std::uint64_t record_bytes() const { return sizeof(RecordHeader) + payload_bytes; }
};

RecordHeader make_record_header(const RecordIdentity& identity,
                                std::span<const std::span<const std::byte>> payload);

// Whether these bytes are an undamaged header of that page. `header` is a stranger's until then.
bool names_record(const RecordHeader& header, const RecordIdentity& identity);

}  // namespace hicache::daemon::redis
