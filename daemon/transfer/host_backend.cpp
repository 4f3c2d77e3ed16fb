// The host device backend: device buffers are memory that the rank exported and the daemon mapped; the CPU
// copies.
#include <cstring>

#include "daemon/transfer/transfer_engine.hpp"

namespace hicache::daemon {
namespace {

// True when `rows` rows of `width` bytes, `pitch` apart, beginning at `offset`, end at or before `size`.
bool fits(std::uint64_t offset, std::uint64_t width, std::uint64_t rows, std::uint64_t pitch,
          std::uint64_t size) {
  std::uint64_t extent = 0;
  if (__builtin_mul_overflow(rows - 1, pitch, &extent)) return false;
  if (__builtin_add_overflow(extent, width, &extent)) return false;
  return extent <= size && offset <= size - extent;
}

class HostBackend final : public DeviceBackend {
 public:
  HostBackend(std::uint8_t* pool, std::uint64_t pool_bytes) : pool_(pool), pool_bytes_(pool_bytes) {}

  Status copy(const RankMemory& memory, Direction direction, const CopyRun& run) override {
    if (run.width == 0 || run.rows == 0 || run.allocation >= memory.allocations.size())
      return Status::internal;
    const Mapping& allocation = memory.allocations[run.allocation];
    if (!fits(run.device_offset, run.width, run.rows, run.device_pitch, allocation.size()))
      return Status::internal;
    if (!fits(run.host_offset, run.width, run.rows, run.host_pitch, pool_bytes_)) return Status::internal;

    std::uint8_t* device = static_cast<std::uint8_t*>(allocation.data()) + run.device_offset;
    std::uint8_t* host = pool_ + run.host_offset;
    if (direction == Direction::write) {
      copy_rows(host, run.host_pitch, device, run.device_pitch, run);
    } else {
      copy_rows(device, run.device_pitch, host, run.host_pitch, run);
    }
    return Status::ok;
  }

 private:
  static void copy_rows(std::uint8_t* to, std::uint64_t to_pitch, const std::uint8_t* from,
                        std::uint64_t from_pitch, const CopyRun& run) {
    for (std::uint64_t row = 0; row < run.rows; ++row) {
      std::memcpy(to + row * to_pitch, from + row * from_pitch, run.width);
    }
  }

  std::uint8_t* pool_;
  std::uint64_t pool_bytes_;
};

}  // namespace

std::unique_ptr<DeviceBackend> make_host_backend(std::uint8_t* pool, std::uint64_t pool_bytes) {
  return std::make_unique<HostBackend>(pool, pool_bytes);
}

}  // namespace hicache::daemon
