// Chunks that go through a rank's staging memory: from a slot that is free to one that is free again.
#pragma once

#include "daemon/cuda/gpu_lane.hpp"

namespace hicache::daemon {

// Begins the next chunk of `job` in a free slot: a load's copies go on the stream, a write's pages are asked
// of the rank. False when every slot is in use. Precondition: job.staged(), its verdict is ok, something is
// left; `chunk` has an event and a stream. Sets the job's verdict when it fails, and the driver's error when
// no event could be recorded: then nothing of the context works any more.
bool begin_staged(GpuChunk& chunk, GpuJob& job, const GpuPool& pool, CUresult& error);

// Moves the lane's staged chunks on, as far as copies have ended and the rank has answered. `abandon`: don't
// wait for its answers. True when one moved.
bool move_staged(GpuLane& lane, const GpuPool& pool, bool abandon, CUresult& error);

}  // namespace hicache::daemon
