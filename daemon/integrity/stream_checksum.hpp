// XXH3-64 over bytes that come in pieces: of records outside host memory, which land bit by bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace hicache::daemon {

// Not thread-safe. Precondition of every use: checksums_available() (shard_checksums.hpp).
class StreamChecksum {
 public:
  StreamChecksum();
  ~StreamChecksum();
  StreamChecksum(StreamChecksum&&) noexcept;
  StreamChecksum& operator=(StreamChecksum&&) noexcept;

  void reset();
  void add(std::span<const std::byte> bytes);
  // Of everything added since reset(); depends on the bytes only, not on how they were cut.
  [[nodiscard]] std::uint64_t value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hicache::daemon
