#include "daemon/storage/file/io_engine.hpp"

#include <cstddef>

namespace hicache::daemon {

void advance(std::vector<iovec>& parts, std::uint64_t bytes) {
  std::size_t whole = 0;
  while (whole < parts.size() && bytes >= parts[whole].iov_len) bytes -= parts[whole++].iov_len;
  parts.erase(parts.begin(), parts.begin() + static_cast<std::ptrdiff_t>(whole));
  if (bytes == 0 || parts.empty()) return;
  parts.front().iov_base = static_cast<std::byte*>(parts.front().iov_base) + bytes;
  parts.front().iov_len -= bytes;
}

Result<std::unique_ptr<IoEngine>> make_io_engine(IoEngineChoice choice, std::uint32_t depth,
                                                 const StoragePool& pool, bool register_pool) {
  if (choice == IoEngineChoice::threads) return make_thread_engine(depth, "");
  auto ring = make_uring_engine(depth, pool, register_pool);
  if (ring || choice == IoEngineChoice::io_uring) return ring;
  return make_thread_engine(depth, ring.error().message);
}

}  // namespace hicache::daemon
