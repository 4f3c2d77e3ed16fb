#include "daemon/storage/redis/page_landing.hpp"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>

#include "shm/crash_points.hpp"

namespace hicache::daemon::redis {

void PageLanding::aim(const RecordIdentity& identity, std::vector<std::span<std::byte>> buffers) {
  identity_ = identity;
  buffers_ = std::move(buffers);
  std::uint64_t room = 0;
  for (const auto& buffer : buffers_) room += buffer.size();
  assert(room == identity_.payload_bytes);
  header_ = RecordHeader{};
  header_filled_ = 0;
  buffer_ = 0;
  buffer_filled_ = 0;
  landed_ = 0;
  checksum_.reset();
}

std::size_t PageLanding::take_header(std::span<const std::byte> bytes) {
  const std::size_t count = std::min(bytes.size(), sizeof header_ - header_filled_);
  std::memcpy(reinterpret_cast<std::byte*>(&header_) + header_filled_, bytes.data(), count);
  header_filled_ += count;
  return count;
}

std::size_t PageLanding::targets(std::span<iovec> targets) const {
  std::size_t count = 0;
  std::size_t filled = buffer_filled_;
  for (std::size_t i = buffer_; i < buffers_.size() && count < targets.size(); ++i, filled = 0) {
    if (filled == buffers_[i].size()) continue;
    targets[count++] = {buffers_[i].data() + filled, buffers_[i].size() - filled};
  }
  return count;
}

void PageLanding::landed(std::size_t bytes) {
  assert(bytes <= missing());
  landed_ += bytes;
  while (bytes > 0) {
    const std::span<std::byte> buffer = buffers_[buffer_];
    const std::size_t count = std::min(bytes, buffer.size() - buffer_filled_);
    checksum_.add(buffer.subspan(buffer_filled_, count));  // while the bytes are in the processor's caches
    buffer_filled_ += count;
    bytes -= count;
    if (buffer_filled_ == buffer.size()) {
      ++buffer_;
      buffer_filled_ = 0;
    }
  }
  HICACHE_CRASH_POINT(redis_read_landing);
}

std::size_t PageLanding::take_payload(std::span<const std::byte> bytes) {
  const auto wanted = static_cast<std::size_t>(std::min<std::uint64_t>(bytes.size(), missing()));
  std::size_t copied = 0;
  while (copied < wanted) {
    iovec place{};
    const std::size_t places = targets({&place, 1});
    assert(places == 1);
    const std::size_t count = std::min(place.iov_len, wanted - copied);
    std::memcpy(place.iov_base, bytes.data() + copied, count);
    landed(count);
    copied += count;
  }
  return copied;
}

}  // namespace hicache::daemon::redis
