// The pool, registered with a rank's GPU context piece by piece: the first piece at once, so that a refusal
// is an error of the registration, the others by a thread. A piece serves as soon as it is registered.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "../cuda_driver.hpp"
#include "shm/shared_memory.hpp"
#include "shm/types.hpp"

namespace hicache {

class HICACHE_LOCAL PoolRegistration {
 public:
  enum class State { waiting, ready, failed };

  // `driver` and `pool` outlive it.
  static Result<std::unique_ptr<PoolRegistration>> begin(const CudaDriver& driver, CUcontext context,
                                                         const Mapping& pool);
  // Stops, and unregisters. No kernel uses the pool any more.
  ~PoolRegistration();
  PoolRegistration(const PoolRegistration&) = delete;
  PoolRegistration& operator=(const PoolRegistration&) = delete;

  // Of the piece in which a shard lies: no slot, and so no shard, crosses a piece's end.
  [[nodiscard]] State state(PoolOffset shard) const;
  // Precondition: ready.
  [[nodiscard]] CUdeviceptr address(PoolOffset shard) const;

 private:
  // Slots don't cross lines of this size, so registrations may end there.
  static constexpr std::uint64_t kPieceBytes = kGiB;
  struct Piece {
    std::atomic<State> state{State::waiting};  // release after `address` is there, acquire before it is used
    CUdeviceptr address = 0;
  };

  PoolRegistration(const CudaDriver& driver, CUcontext context, const Mapping& pool)
      : driver_(driver),
        context_(context),
        pool_(pool),
        pieces_((pool.size() + kPieceBytes - 1) / kPieceBytes) {}
  Outcome take(std::size_t i);

  const CudaDriver& driver_;
  const CUcontext context_;
  const Mapping& pool_;
  std::vector<Piece> pieces_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace hicache
