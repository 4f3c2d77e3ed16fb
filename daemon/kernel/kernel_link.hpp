// What the daemon shares with one rank that moves its pages itself (io_backend kernel): the kernel block, the
// eventfd on which the rank tells that requests have ended, and the rank's process, whose end is the only
// other proof that a request is over.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "shm/fd.hpp"
#include "shm/kernel_layout.hpp"
#include "shm/process.hpp"
#include "shm/shared_memory.hpp"
#include "shm/status.hpp"

namespace hicache::daemon {

struct KernelLink {
  // system_error when the block or the eventfd can't be made, not_permitted when the process can't be
  // watched: a rank whose end nobody would see must not write to the pool.
  static Result<std::shared_ptr<KernelLink>> create(const ProcessIdentity& process);

  [[nodiscard]] KernelBlock& block() const { return *static_cast<KernelBlock*>(mapping.data()); }

  ProcessIdentity process;
  UniqueFd pidfd;     // readable once the process and its memory are gone
  UniqueFd news;      // eventfd, written by the rank after it has ended requests
  UniqueFd block_fd;  // of the kernel block, for Welcome
  Mapping mapping;

  // The rest belongs to the thread of KernelTransfers.
  std::uint64_t next_number = 0;
  std::array<std::uint64_t, kKernelSlots> ended{};  // by slot: the last number whose end was accepted
  bool gone = false;                                // the process has ended
  bool broken = false;                              // it reported what can't be: nothing it says counts
};

}  // namespace hicache::daemon
