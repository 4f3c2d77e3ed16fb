// Where a record lands: its header here, its payload straight in the pool's buffers, checked as it comes.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "daemon/integrity/stream_checksum.hpp"
#include "daemon/storage/redis/record.hpp"

namespace hicache::daemon::redis {

// One record at a time. Never touches a byte outside the buffers it was aimed at. Not thread-safe.
class PageLanding {
 public:
  // The buffers hold identity.payload_bytes together and stay valid until the record has ended.
  void aim(const RecordIdentity& identity, std::vector<std::span<std::byte>> buffers);

  [[nodiscard]] std::uint64_t record_bytes() const { return identity_.record_bytes(); }

  // Takes bytes of the header; returns how many. With the last one, header_good() says whether the payload is
  // wanted.
  std::size_t take_header(std::span<const std::byte> bytes);
  [[nodiscard]] bool header_whole() const { return header_filled_ == sizeof header_; }
  [[nodiscard]] bool header_good() const { return header_whole() && names_record(header_, identity_); }

  // The payload's free places, in order: at most targets.size(). Returns how many were set.
  [[nodiscard]] std::size_t targets(std::span<iovec> targets) const;
  [[nodiscard]] std::uint64_t missing() const { return identity_.payload_bytes - landed_; }
  // `bytes` of the payload were written to the places that targets() named. Precondition: at most missing().
  void landed(std::size_t bytes);
  // Copies bytes of the payload; returns how many.
  std::size_t take_payload(std::span<const std::byte> bytes);
  // The payload is whole and has the checksum of its header.
  [[nodiscard]] bool payload_good() const {
    return missing() == 0 && checksum_.value() == header_.payload_checksum;
  }

 private:
  RecordIdentity identity_{StorageNamespace{}, PrefixHash{}};
  RecordHeader header_;
  std::size_t header_filled_ = 0;
  std::vector<std::span<std::byte>> buffers_;
  std::size_t buffer_ = 0;         // the one that is being filled
  std::size_t buffer_filled_ = 0;  // bytes of it
  std::uint64_t landed_ = 0;       // bytes of all
  StreamChecksum checksum_;
};

}  // namespace hicache::daemon::redis
