// Checksums of what leaves the pool for a storage medium: one over all pieces of a page, and over headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace hicache::daemon {

// XXH3 with 64 bits of the pieces' bytes, one after the other. Formats that carry checksums are refused in a
// build without xxHash: checksums_available() (shard_checksums.hpp) says which it is.
// Thread safety: any thread.
std::uint64_t payload_checksum(std::span<const std::span<const std::byte>> pieces);
std::uint64_t payload_checksum(std::span<const std::byte> bytes);

}  // namespace hicache::daemon
