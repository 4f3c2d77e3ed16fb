#include "daemon/integrity/payload_checksum.hpp"

#include <cassert>

#include "daemon/integrity/stream_checksum.hpp"

#ifdef HICACHE_HAVE_XXHASH
#define XXH_INLINE_ALL
#include <xxhash.h>
#endif

namespace hicache::daemon {

std::uint64_t payload_checksum([[maybe_unused]] std::span<const std::byte> bytes) {
#ifdef HICACHE_HAVE_XXHASH
  return XXH3_64bits(bytes.data(), bytes.size());
#else
  assert(!"formats with checksums are refused in a build without xxHash");
  return 0;
#endif
}

std::uint64_t payload_checksum(std::span<const std::span<const std::byte>> pieces) {
  // The usual page is one piece, which needs no state.
  if (pieces.size() == 1) return payload_checksum(pieces.front());
  StreamChecksum sum;
  for (const auto& piece : pieces) sum.add(piece);
  return sum.value();
}

}  // namespace hicache::daemon
