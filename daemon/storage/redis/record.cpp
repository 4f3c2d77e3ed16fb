#include "daemon/storage/redis/record.hpp"

#include "daemon/integrity/payload_checksum.hpp"

namespace hicache::daemon::redis {
namespace {

std::uint64_t header_checksum(const RecordHeader& header) {
  return payload_checksum(
      std::as_bytes(std::span(&header, 1)).first(offsetof(RecordHeader, header_checksum)));
}

}  // namespace

RecordHeader make_record_header(const RecordIdentity& identity,
                                std::span<const std::span<const std::byte>> payload) {
  RecordHeader header;
  header.header_bytes = sizeof header;
  header.key = identity.key;
  header.ns = identity.ns;
  header.payload_bytes = identity.payload_bytes;
  header.shards = identity.shards;
  header.payload_checksum = payload_checksum(payload);
  header.header_checksum = header_checksum(header);
  return header;
}

bool names_record(const RecordHeader& header, const RecordIdentity& identity) {
  return header.magic == RecordHeader::kMagic && header.version == RecordHeader::kVersion &&
         header.header_bytes == sizeof header && header.key == identity.key && header.ns == identity.ns &&
         header.payload_bytes == identity.payload_bytes && header.shards == identity.shards &&
         header.header_checksum == header_checksum(header);
}

}  // namespace hicache::daemon::redis
