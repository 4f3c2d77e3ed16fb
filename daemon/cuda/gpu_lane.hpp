// A rank's copies in one direction: a stream, the jobs that wait for it, and the chunks that are on it. Lanes
// are what keeps ranks apart: none waits behind another's stream.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "daemon/cuda/driver.hpp"
#include "daemon/cuda/gpu_job.hpp"

namespace hicache::daemon {

// Where a chunk that goes through staging memory is. Writes: with_rank, copying, ended; loads: copying,
// with_rank, ended.
enum class StagedStage : std::uint8_t { none, copying, with_rank, ended };

struct GpuChunk {
  CUevent event = nullptr;  // behind its copies
  CUstream stream = nullptr;
  StagedStage stage = StagedStage::none;  // none: the copies are all there is to it
  std::uint32_t slot = 0;                 // of the staging memory
  StagedChunk part;                       // what the slot holds
  std::uint64_t enqueue_ns = 0;           // that handing its copies to the driver took
  ChunkWork work;
  GpuJob* job = nullptr;  // in `owner`, in a later chunk, or at the head of the lane's queue
  GpuJobPtr owner;        // the job, in its last chunk
};

// Used by the GPU's transfer thread only; the streams are made and destroyed by the owner.
struct GpuLane {
  std::vector<CUstream> streams;  // chunks take them in turn
  std::size_t next_stream = 0;
  std::deque<GpuJobPtr> queue;     // the front one may be partly on the stream
  std::deque<GpuChunk> in_flight;  // oldest first
  std::size_t staged = 0;          // of them, those that go through staging memory
  bool active = false;             // in the transfer thread's list
  bool peer_gone = false;          // the rank answers no more
};

}  // namespace hicache::daemon
