#include "daemon/cuda/staged_chunks.hpp"

#include <algorithm>
#include <exception>
#include <span>

#include "daemon/cuda/gpu_memory.hpp"
#include "shm/clock.hpp"

namespace hicache::daemon {
namespace {

const CudaDriver& driver_of(const GpuChunk& chunk) {
  return chunk.job->memory().gpu().driver();
}

void ask_rank(GpuChunk& chunk) {
  const Transfer& transfer = chunk.job->base().transfer;
  StagingRequest request;
  request.first_layer = chunk.part.first_layer;
  request.end_layer = chunk.part.end_layer;
  request.pages = std::span<const PagePair>(transfer.pages)
                      .subspan(chunk.part.first_page, chunk.part.end_page - chunk.part.first_page);
  chunk.job->memory().staging()->post(chunk.slot, request);
  chunk.stage = StagedStage::with_rank;
}

void copy(GpuChunk& chunk, const GpuPool& pool, CUresult& error) {
  GpuJob& job = *chunk.job;
  const std::uint64_t start = monotonic_ns();
  try {
    chunk.work.copies = job.enqueue_staged(pool, chunk.part, chunk.slot, chunk.stream);
  } catch (const std::exception&) {
    // Out of memory for a plan: this transfer fails, the others go on.
    job.base().verdict = Status::internal;
  }
  // In any case: some of the copies may be on the stream.
  if (const CUresult r = driver_of(chunk).cuEventRecord(chunk.event, chunk.stream); r != CUDA_SUCCESS)
    error = r;
  chunk.enqueue_ns = monotonic_ns() - start;
  chunk.stage = StagedStage::copying;
}

// With the rank, until it has answered or there is no more to wait for.
bool look_at_answer(GpuChunk& chunk, const GpuPool& pool, bool abandon, CUresult& error) {
  TransferJob& base = chunk.job->base();
  StagingRing& ring = *chunk.job->memory().staging();
  switch (ring.answer(chunk.slot)) {
    case StagingRing::Answer::refused:
      if (base.verdict == Status::ok) base.verdict = Status::system_error;
      chunk.stage = StagedStage::ended;
      return true;
    case StagingRing::Answer::done:
      if (base.transfer.direction == Direction::write && base.verdict == Status::ok) {
        copy(chunk, pool, error);
      } else {
        chunk.stage = StagedStage::ended;
      }
      return true;
    case StagingRing::Answer::waiting:
      break;
  }
  if (abandon) {
    if (base.verdict == Status::ok) base.verdict = Status::peer_lost;
  } else if (base.verdict == Status::ok || !ring.withdraw(chunk.slot)) {
    return false;
  }
  chunk.stage = StagedStage::ended;
  return true;
}

}  // namespace

bool begin_staged(GpuChunk& chunk, GpuJob& job, const GpuPool& pool, CUresult& error) {
  const Direction direction = job.base().transfer.direction;
  const auto slot = job.memory().staging()->take(direction);
  if (!slot) return false;
  chunk.job = &job;
  chunk.slot = *slot;
  chunk.work = job.next_staged(chunk.part);
  if (direction == Direction::load) {
    copy(chunk, pool, error);
    job.memory().staging()->rouse();  // while the copy runs
  } else {
    ask_rank(chunk);
  }
  return true;
}

bool move_staged(GpuLane& lane, const GpuPool& pool, bool abandon, CUresult& error) {
  if (lane.staged == 0) return false;
  bool any = false;
  lane.running
      .clear();  // streams whose copies end in order: behind one that runs there is none that has ended
  for (GpuChunk& chunk : lane.in_flight) {
    if (chunk.stage == StagedStage::with_rank) {
      any |= look_at_answer(chunk, pool, abandon, error);
    } else if (chunk.stage == StagedStage::copying &&
               std::find(lane.running.begin(), lane.running.end(), chunk.stream) == lane.running.end()) {
      const CUresult r = driver_of(chunk).cuEventQuery(chunk.event);
      if (r == CUDA_ERROR_NOT_READY) {
        lane.running.push_back(chunk.stream);
        continue;
      }
      any = true;
      if (r != CUDA_SUCCESS) {
        error = r;
        return any;
      }
      const TransferJob& base = chunk.job->base();
      if (base.transfer.direction == Direction::load && base.verdict == Status::ok) {
        ask_rank(chunk);
      } else {
        chunk.stage = StagedStage::ended;
      }
    }
  }
  return any;
}

}  // namespace hicache::daemon
