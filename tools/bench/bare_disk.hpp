// What the disk of a directory gives without hicache: one ring of io_uring, O_DIRECT, registered buffers, one
// preallocated file.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "shm/status.hpp"

namespace hicache::bench {

// A file of `bytes` in a directory, removed when this goes, and a ring for it.
class BareDisk {
 public:
  // system_error where the build or the kernel has no io_uring, or the directory no O_DIRECT.
  static Result<std::unique_ptr<BareDisk>> create(const std::string& directory, std::span<std::byte> memory,
                                                  std::uint32_t depth);
  virtual ~BareDisk() = default;
  // Moves the pieces of `bytes` each between memory and file, `depth` of them in flight: piece i of `order`
  // lies at i * bytes in both.
  virtual Outcome write(const std::vector<std::uint32_t>& order, std::uint64_t bytes) = 0;
  virtual Outcome read(const std::vector<std::uint32_t>& order, std::uint64_t bytes) = 0;
};

}  // namespace hicache::bench
