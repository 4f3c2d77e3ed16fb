// Moves pages of host memory with the rank's own CPU.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "page_mover.hpp"
#include "shm/channel_layout.hpp"
#include "shm/device_geometry.hpp"
#include "shm/shared_memory.hpp"

namespace hicache {

class HICACHE_LOCAL HostPageMover final : public PageMover {
 public:
  // Maps the allocations' memfds once more; they have been checked to be sealed and long enough. `pool` and
  // `fences` outlive it.
  static Result<std::unique_ptr<PageMover>> create(const NamespaceSpec& spec, const DeviceGeometry& geometry,
                                                   std::span<const int> fds, const Mapping& pool,
                                                   FenceBlock& fences, const PoolGuard& guard);

  [[nodiscard]] bool has_room(bool) const override { return !ended_; }
  void begin(const KernelWork& work) override;
  std::optional<KernelEnd> next_end() override;
  void finish() override {}  // begin() returns when the bytes are there
  [[nodiscard]] bool busy() const override { return ended_.has_value(); }

 private:
  // A tensor, and where its pieces lie in a shard.
  struct Piece {
    std::uint8_t* device = nullptr;  // of page or state slot 0
    std::uint64_t page_stride = 0;
    std::uint64_t bytes = 0;
    std::uint64_t shard_offset = 0;
    std::uint32_t layer = 0;  // with which it is announced
    bool states = false;
  };

  HostPageMover(const NamespaceSpec& spec, const Mapping& pool, FenceBlock& fences, const PoolGuard& guard)
      : layers_(spec.layers),
        pool_(static_cast<std::uint8_t*>(pool.data())),
        fences_(fences),
        guard_(guard) {}
  std::uint64_t copy(const KernelWork& work, const Piece& piece);

  const std::uint32_t layers_;
  std::uint8_t* const pool_;
  FenceBlock& fences_;
  const PoolGuard guard_;
  std::vector<Mapping> allocations_;
  std::vector<Piece> pieces_;  // by layer
  std::optional<KernelEnd> ended_;
};

}  // namespace hicache
