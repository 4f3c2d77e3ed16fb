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

struct GpuChunk {
  CUevent event = nullptr;
  CUstream stream = nullptr;
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
  bool active = false;             // in the transfer thread's list
};

}  // namespace hicache::daemon
