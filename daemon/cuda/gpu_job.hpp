// A transfer on its way through a GPU: its copies are put on a stream in chunks, each of which ends with an
// event.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "daemon/cuda/driver.hpp"
#include "daemon/cuda/pass_on.hpp"
#include "daemon/transfer/exchange.hpp"
#include "daemon/transfer/schedule.hpp"
#include "daemon/transfer/staged_plan.hpp"
#include "daemon/transfer/transfer_job.hpp"

namespace hicache::daemon {

class GpuMemory;
struct ChecksumBatch;

// The pool as the copies see it.
struct GpuPool {
  std::uint8_t* data = nullptr;
  std::uint64_t bytes = 0;
  std::uint64_t border_bytes = 0;  // no copy crosses it
};

// What one call put on the stream.
struct ChunkWork {
  std::uint64_t bytes = 0;
  std::uint32_t copies = 0;
  std::uint32_t first_layer = 0;  // layers [first_layer, end_layer) are complete when the chunk has ended
  std::uint32_t end_layer = 0;
};

// Used by the GPU's transfer thread only.
class GpuJob {
 public:
  explicit GpuJob(TransferJobPtr job);

  // Decides how the pages go, at the first call; sets the job's verdict when that fails.
  void begin(const GpuPool& pool);
  // A load that waits for its pages' checksums to be compared. Empty once they are, or when none are.
  std::shared_ptr<ChecksumBatch> comparing;

  // The pages go through staging memory: next_staged and enqueue_staged instead of enqueue.
  [[nodiscard]] bool staged() const { return schedule_.staged; }
  // The next chunk of a slot's size. Precondition: begun, staged, the verdict is ok, not all_enqueued.
  ChunkWork next_staged(StagedChunk& chunk);
  // Puts the copies between a chunk's pages in the pool and a slot on the stream. Their number.
  std::uint32_t enqueue_staged(const GpuPool& pool, const StagedChunk& chunk, std::uint32_t slot,
                               CUstream stream);

  // Puts about one chunk more on the stream; sets the job's verdict when that fails. Precondition: the
  // verdict is ok and not everything has been put.
  ChunkWork enqueue(const GpuPool& pool, CUstream stream);
  // Ends the job after a call of the driver that failed.
  void fail(CUresult result, const char* what);
  // Has the stream announce layers [first_layer, end_layer) when it gets there.
  void announce(const ChunkWork& chunk, CUstream stream);
  // Whether everything is on the stream.
  [[nodiscard]] bool all_enqueued() const { return begun_ && group_first_ >= layers_; }
  // The first byte of the pool behind the pages.
  [[nodiscard]] std::uint64_t pool_end() const { return pool_end_; }
  [[nodiscard]] TransferJob& base() { return *job_; }
  [[nodiscard]] const TransferJob& base() const { return *job_; }
  [[nodiscard]] TransferJobPtr release_base() { return std::move(job_); }

  // A load that should be done together with its group's.
  void want_group() { wants_group_ = true; }
  [[nodiscard]] bool wants_group() const { return wants_group_; }
  // It waits for its group until `until_ns`, then is a part of an exchange or direct.
  void gather(std::shared_ptr<Exchange> exchange, std::uint64_t until_ns) {
    exchange_ = std::move(exchange);
    gather_until_ns_ = until_ns;
  }
  [[nodiscard]] std::uint64_t gather_until_ns() const { return gather_until_ns_; }
  // Null for a direct transfer.
  [[nodiscard]] Exchange* exchange() const { return exchange_.get(); }
  void go_direct() {
    exchange_.reset();
    wants_group_ = false;
  }
  // Becomes the rank's part of the exchange that was agreed.
  void take_part();
  [[nodiscard]] bool is_part() const { return is_part_; }
  // What has to go to other GPUs; null when nothing has.
  [[nodiscard]] PassOn* pass_on() { return pass_on_ ? &*pass_on_ : nullptr; }
  [[nodiscard]] const GpuMemory& memory() const;
  // The layers' words when they are announced, or null.
  [[nodiscard]] LayerFences* layer_fences() const;

 private:
  void plan_part(const GpuPool& pool);
  void end_part(ChunkWork& chunk);
  void put_copy(const GpuPool& pool, CUdeviceptr device, std::uint64_t device_bytes, const CopyRun& run,
                CUstream stream);
  void put_batch(const GpuPool& pool, std::span<const CopyRun> runs, CUstream stream);
  [[nodiscard]] bool ends_layers() const { return is_part_ || job_->announces_layers(); }
  [[nodiscard]] std::size_t pages_per_part() const;
  void find_pool_end();

  TransferJobPtr job_;
  std::shared_ptr<Exchange> exchange_;
  std::uint64_t gather_until_ns_ = 0;
  bool wants_group_ = false;
  bool is_part_ = false;
  std::optional<PassOn> pass_on_;
  std::uint64_t pool_end_ = 0;
  std::uint32_t layers_ = 0;
  bool begun_ = false;
  Schedule schedule_;
  std::uint32_t group_first_ = 0;  // the group in work: [group_first_, group_end_)
  std::uint32_t group_end_ = 0;
  std::size_t part_first_ = 0;  // pages of the part in work: [part_first_, part_end_)
  std::size_t part_end_ = 0;
  std::size_t next_run_ = 0;
  bool planned_ = false;
};

using GpuJobPtr = std::unique_ptr<GpuJob>;

}  // namespace hicache::daemon
