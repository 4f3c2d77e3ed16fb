#include "pool_registration.hpp"

#include <pthread.h>

#include <algorithm>
#include <csignal>
#include <string>

namespace hicache {

Outcome PoolRegistration::take(std::size_t i) {
  Piece& piece = pieces_[i];
  const std::uint64_t offset = i * kPieceBytes;
  const std::uint64_t bytes = std::min(kPieceBytes, pool_.size() - offset);
  void* start = static_cast<std::uint8_t*>(pool_.data()) + offset;
  const CudaContextScope scope(driver_, context_);
  CUresult r =
      driver_.cuMemHostRegister(start, bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
  if (r == CUDA_SUCCESS) {
    r = driver_.cuMemHostGetDevicePointer(&piece.address, start, 0);
    if (r != CUDA_SUCCESS) static_cast<void>(driver_.cuMemHostUnregister(start));
  }
  piece.state.store(r == CUDA_SUCCESS ? State::ready : State::failed, std::memory_order_release);
  if (r == CUDA_SUCCESS) return success();
  return cuda_error(driver_, r,
                    "registering " + std::to_string(bytes) +
                        " bytes of the pool (is the memlock limit of this "
                        "process, ulimit -l, at least the pool's size?)");
}

Result<std::unique_ptr<PoolRegistration>> PoolRegistration::begin(const CudaDriver& driver, CUcontext context,
                                                                  const Mapping& pool) {
  std::unique_ptr<PoolRegistration> made(new PoolRegistration(driver, context, pool));
  if (auto first = made->take(0); !first) return first.error();
  // The engine's signal handlers must not run in this thread.
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  made->thread_ = std::thread([raw = made.get()] {
    for (std::size_t i = 1; i < raw->pieces_.size() && !raw->stopping_.load(std::memory_order_relaxed); ++i)
      static_cast<void>(raw->take(i));  // requests for pages there fail
  });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return made;
}

PoolRegistration::~PoolRegistration() {
  stopping_.store(true, std::memory_order_relaxed);
  if (thread_.joinable()) thread_.join();
  const CudaContextScope scope(driver_, context_);
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    if (pieces_[i].state.load(std::memory_order_acquire) != State::ready) continue;
    void* start = static_cast<std::uint8_t*>(pool_.data()) + i * kPieceBytes;
    // At process exit the driver may be gone already, and the registration with it.
    static_cast<void>(driver_.cuMemHostUnregister(start));
  }
}

PoolRegistration::State PoolRegistration::state(PoolOffset shard) const {
  return pieces_[shard.value / kPieceBytes].state.load(std::memory_order_acquire);
}

CUdeviceptr PoolRegistration::address(PoolOffset shard) const {
  return pieces_[shard.value / kPieceBytes].address + shard.value % kPieceBytes;
}

}  // namespace hicache
