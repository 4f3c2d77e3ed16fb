#include "daemon/integrity/stream_checksum.hpp"

#ifdef HICACHE_HAVE_XXHASH
#define XXH_INLINE_ALL
#include <xxhash.h>
#endif

namespace hicache::daemon {

#ifdef HICACHE_HAVE_XXHASH
struct StreamChecksum::State {
  XXH3_state_t xxh;
};

void StreamChecksum::reset() {
  XXH3_64bits_reset(&state_->xxh);
}
void StreamChecksum::add(std::span<const std::byte> bytes) {
  XXH3_64bits_update(&state_->xxh, bytes.data(), bytes.size());
}
std::uint64_t StreamChecksum::value() const {
  return XXH3_64bits_digest(&state_->xxh);
}
#else
struct StreamChecksum::State {};

void StreamChecksum::reset() {}
void StreamChecksum::add(std::span<const std::byte>) {}
std::uint64_t StreamChecksum::value() const {
  return 0;
}
#endif

StreamChecksum::StreamChecksum() : state_(std::make_unique<State>()) {
  reset();
}
StreamChecksum::~StreamChecksum() = default;
StreamChecksum::StreamChecksum(StreamChecksum&&) noexcept = default;
StreamChecksum& StreamChecksum::operator=(StreamChecksum&&) noexcept = default;

}  // namespace hicache::daemon
