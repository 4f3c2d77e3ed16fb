// Transfers of ranks in io_backend kernel: the daemon leases pool pages to the rank, the rank's own kernels
// (or its CPU, for host memory) move the bytes, and the rank reports the end. No byte is copied here.
//
// A request that the rank has not taken can be withdrawn. One that it has taken ends in one of two ways: the
// rank reports its end, or its process is gone. Until then the transfer is in flight, and the coordinator
// keeps the pages from everybody else: a kernel that runs may still write to them, whatever the session's
// state.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "daemon/integrity/shard_checksums.hpp"
#include "daemon/transfer/transfers.hpp"
#include "shm/process.hpp"

namespace hicache::daemon {

struct KernelOptions {
  std::uint64_t pool_bytes = 0;
  std::uint32_t block_quota = 2;  // blocks of a gather or scatter kernel at most
  const ShardChecksums* checksums = nullptr;
  TransferSink sink;
  // A rank reported what can't be. Called once a session, on the thread of KernelTransfers.
  std::function<void(ClientSlot, Generation, const std::string& what)> broken;
};

class KernelTransfers final : public Transfers {
 public:
  explicit KernelTransfers(KernelOptions options);
  // Ends what no rank has taken with shutting_down and joins the thread. What a rank has taken is never
  // reported: nobody can know how it ends.
  ~KernelTransfers() override;
  KernelTransfers(const KernelTransfers&) = delete;
  KernelTransfers& operator=(const KernelTransfers&) = delete;

  // Precondition: transfer.memory->kernel is set.
  void submit(Transfer transfer) override;
  void cancel(TransferId id) override;
  void cancel_client(ClientSlot client, Generation generation) override;

  // Calls `gone` once, on the thread of KernelTransfers, when that process has ended with its memory.
  void await_end(const ProcessIdentity& process, std::function<void()> gone);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace hicache::daemon
