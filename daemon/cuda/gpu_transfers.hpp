// Moves pages between ranks' GPU memory and the pool with one GPU's copy engines. One thread: it sees write
// fences reached before it puts their copies on a stream, has the streams announce layers, and sees copies
// end by events. Loads that a group does together are gathered here, each rank's by the thread of its GPU.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "daemon/cuda/gpu.hpp"
#include "daemon/cuda/gpu_job.hpp"
#include "daemon/cuda/pool_pinner.hpp"
#include "daemon/integrity/shard_checksums.hpp"
#include "daemon/transfer/transfers.hpp"

namespace hicache::daemon {

// Since the start. Thread-safe to read.
struct GpuCounters {
  std::atomic<std::uint64_t> transfers{0};
  std::atomic<std::uint64_t> failed{0};
  std::atomic<std::uint64_t> copies{0};
  std::atomic<std::uint64_t> enqueue_ns{0};
  std::atomic<std::uint64_t> staged_chunks{0};
  std::atomic<std::uint64_t> bytes_written{0};
  std::atomic<std::uint64_t> bytes_loaded{0};
  std::atomic<std::uint64_t> bytes_passed{0};  // to other GPUs
  std::atomic<bool> broken{false};             // the context is unusable: every transfer fails
};

class GpuTransfers final : public Transfers {
 public:
  // `pinner`, `exchanges` and `checksums` outlive this; without checksums (nullptr, or a policy that keeps
  // none) there are no threads for them.
  GpuTransfers(std::shared_ptr<Gpu> gpu, const GpuPool& pool, const PoolPinner& pinner,
               ExchangeTable& exchanges, TransferSink sink, const ShardChecksums* checksums,
               std::uint32_t checksum_threads);
  // Ends waiting transfers with shutting_down, waits for copies in flight, joins the thread.
  ~GpuTransfers() override;

  void submit(Transfer transfer) override;
  // A transfer that copies is cut short: what is on its stream still ends.
  void cancel(TransferId id) override;
  void cancel_client(ClientSlot client, Generation generation) override;

  [[nodiscard]] const std::shared_ptr<Gpu>& gpu() const;
  [[nodiscard]] const GpuCounters& counters() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace hicache::daemon
