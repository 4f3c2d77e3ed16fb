// A rank's copies in one direction: a stream, the jobs that wait for it, and the chunks that are on it. Lanes
// are what keeps ranks apart: none waits behind another's stream.
#pragma once

#include <algorithm>
#include <cstddef>
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
  // Staged writes take two streams in turn, whatever is configured: each chunk is one large copy, and the
  // next one starts while the last one ends. Staged loads keep to one: a copy engine runs what one stream
  // holds before it looks at another, so the second chunk of a load's first layers would wait for half of its
  // other layers. Direct chunks are many copies each and keep to one, unless configured.
  static constexpr std::size_t kStagedWriteStreams = 2;
  static constexpr std::size_t kStagedLoadStreams = 1;

  // Of the next chunk.
  [[nodiscard]] CUstream stream(bool for_staged) const {
    return streams[turn % (for_staged ? staged_streams : direct_streams)];
  }

  std::vector<CUstream> streams;
  std::size_t direct_streams = 1;  // the first ones of them, for chunks that are not staged
  std::size_t staged_streams = 1;  // the first ones of them, for those that are
  std::size_t turn = 0;            // grows with every chunk
  std::deque<GpuJobPtr> queue;     // the front one may be partly on the stream
  std::deque<GpuChunk> in_flight;  // oldest first
  std::size_t staged = 0;          // of them, those that go through staging memory
  std::vector<CUstream> running;   // scratch of move_staged()
  bool active = false;             // in the transfer thread's list
  bool peer_gone = false;          // the rank answers no more
};

}  // namespace hicache::daemon
