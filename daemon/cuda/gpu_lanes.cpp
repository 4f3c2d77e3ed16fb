// A GPU's transfer thread at its lanes: chunks go on streams, and are seen to end.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "daemon/cuda/gpu_transfers_impl.hpp"
#include "daemon/cuda/staged_chunks.hpp"
#include "shm/clock.hpp"
#include "shm/layer_fences.hpp"

namespace hicache::daemon {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;
// Chunks of a lane on each of its streams: enough that the copy engine never waits for this thread, few
// enough that a rank gets its turn soon.
constexpr std::size_t kChunksPerStream = 4;

}  // namespace

CUevent GpuTransfers::Impl::take_event() {
  if (!spare_events.empty()) {
    const CUevent event = spare_events.back();
    spare_events.pop_back();
    return event;
  }
  CUevent event = nullptr;
  if (const CUresult r = gpu->driver().cuEventCreate(&event, CU_EVENT_DISABLE_TIMING); r != CUDA_SUCCESS) {
    break_down(r, "cuEventCreate");
    return nullptr;
  }
  return event;
}

// An error of the context: no copy of it runs any more, and none will.
void GpuTransfers::Impl::break_down(CUresult result, const char* what) {
  if (counters.broken.exchange(true, kRelaxed)) return;
  spdlog::error("{}: every transfer of this GPU fails until the daemon is restarted",
                cuda_error(gpu->driver(), result, uuid_text(gpu->device().uuid) + ": " + what).message);
}

// Moves chunks on that go through staging memory.
bool GpuTransfers::Impl::move(GpuLane& lane) {
  if (counters.broken.load(kRelaxed)) return false;
  const bool abandon = lane.peer_gone || (give_up_ns != 0 && monotonic_ns() > give_up_ns);
  CUresult error = CUDA_SUCCESS;
  const bool any = move_staged(lane, pool, abandon, error);
  if (error != CUDA_SUCCESS) break_down(error, "a staged copy failed");
  return any;
}

bool GpuTransfers::Impl::reap(GpuLane& lane) {
  bool any = false;
  while (!lane.in_flight.empty()) {
    GpuChunk& chunk = lane.in_flight.front();
    TransferJob& base = chunk.job->base();
    const bool staged = chunk.stage != StagedStage::none;
    if (staged) {
      if (chunk.stage != StagedStage::ended && !counters.broken.load(kRelaxed)) break;
      chunk.job->memory().staging()->give_back(chunk.slot);
      counters.copies.fetch_add(chunk.work.copies, kRelaxed);
      counters.enqueue_ns.fetch_add(chunk.enqueue_ns, kRelaxed);
      counters.staged_chunks.fetch_add(1, kRelaxed);
      --lane.staged;
    } else if (chunk.event != nullptr && !counters.broken.load(kRelaxed)) {
      const CUresult r = gpu->driver().cuEventQuery(chunk.event);
      if (r == CUDA_ERROR_NOT_READY) break;
      if (r != CUDA_SUCCESS) break_down(r, "a copy failed");
    }
    if (counters.broken.load(kRelaxed)) {
      if (base.verdict == Status::ok) base.verdict = Status::system_error;
    } else {
      base.bytes += chunk.work.bytes;
    }
    if (chunk.event != nullptr) spare_events.push_back(chunk.event);
    if (chunk.job->is_part()) {
      if (chunk.work.end_layer > 0 && base.verdict == Status::ok)
        chunk.job->exchange()->landed(base.transfer.group->rank, chunk.work.end_layer);
    } else if (LayerFences* fences = chunk.job->layer_fences();
               fences != nullptr && base.verdict == Status::ok) {
      // The stream has raised the words already, unless it cannot.
      const bool by_cpu = staged || chunk.job->memory().fence_address(fences->layer[0]) == 0;
      for (std::uint32_t l = chunk.work.first_layer; by_cpu && l < chunk.work.end_layer; ++l) {
        raise_layer_word(fences->layer[l], base.transfer.fence_value);
      }
      if (chunk.work.end_layer > 0) wake_layer_waiters(*fences);
    }
    GpuJobPtr ended = std::move(chunk.owner);
    lane.in_flight.pop_front();
    if (ended != nullptr) finish(std::move(ended));
    any = true;
  }
  return any;
}

// Layers become complete in order, and words only grow: a word waits for everything that the lane's streams
// hold.
void GpuTransfers::Impl::announce(const GpuLane& lane, const GpuChunk& chunk) {
  for (const GpuChunk& other : lane.in_flight) {
    if (other.stream == chunk.stream) continue;
    if (const CUresult r = gpu->driver().cuStreamWaitEvent(chunk.stream, other.event, CU_EVENT_WAIT_DEFAULT);
        r != CUDA_SUCCESS) {
      return break_down(r, "cuStreamWaitEvent");
    }
  }
  chunk.job->announce(chunk.work, chunk.stream);
}

// Puts what the chunk has brought for other GPUs on their streams. Returns the stream behind whose work the
// chunk has ended.
CUstream GpuTransfers::Impl::pass_on(GpuJob& job, GpuChunk& chunk) {
  PassOn* passing = job.pass_on();
  if (passing == nullptr || !passing->pending() || job.base().verdict != Status::ok) return chunk.stream;
  const PassOn::Put put = passing->put(chunk.stream, handover);
  chunk.work.copies += put.copies;
  counters.bytes_passed.fetch_add(put.bytes, kRelaxed);
  if (put.last == nullptr) {
    break_down(put.result, put.what);
    return chunk.stream;
  }
  if (put.result != CUDA_SUCCESS) job.fail(put.result, put.what);
  return put.last;
}

// Puts one chunk more on one of the lane's streams, or ends jobs at its head that have a verdict.
bool GpuTransfers::Impl::feed(GpuLane& lane, std::uint64_t now) {
  bool any = false;
  while (!lane.queue.empty()) {
    GpuJob& job = *lane.queue.front();
    TransferJob& base = job.base();
    if (base.verdict == Status::ok && counters.broken.load(kRelaxed)) base.verdict = Status::system_error;
    if (base.verdict == Status::ok && base.expired(now)) base.verdict = Status::timed_out;
    if (job.is_part()) {
      if (base.verdict == Status::ok) base.verdict = job.exchange()->verdict();
      if (base.verdict != Status::ok) job.exchange()->fail(base.verdict);
    }
    if (base.verdict != Status::ok) {
      // Its own chunks must have ended, and a stream's late word must not move back what the CPU raises.
      if (!lane.in_flight.empty()) return any;
      GpuJobPtr ended = std::move(lane.queue.front());
      lane.queue.pop_front();
      finish(std::move(ended));
      any = true;
      continue;
    }
    job.begin(pool);
    if (base.verdict != Status::ok) continue;
    if (!has_room(lane, job)) return any;
    if (job.staged()) return feed_staged(lane, job) || any;
    GpuChunk chunk;
    chunk.event = take_event();
    if (chunk.event == nullptr) continue;  // broken down
    chunk.job = &job;
    chunk.stream = lane.stream(false);
    const std::uint64_t start = monotonic_ns();
    chunk.work = job.enqueue(pool, chunk.stream);
    const CUstream last = pass_on(job, chunk);
    counters.enqueue_ns.fetch_add(monotonic_ns() - start, kRelaxed);
    counters.copies.fetch_add(chunk.work.copies, kRelaxed);
    if (chunk.work.end_layer > 0 && base.verdict == Status::ok && !job.is_part()) announce(lane, chunk);
    if (const CUresult r = gpu->driver().cuEventRecord(chunk.event, last); r != CUDA_SUCCESS) {
      break_down(r, "cuEventRecord");
    }
    put_in_flight(lane, std::move(chunk));
    return true;
  }
  return any;
}

bool GpuTransfers::Impl::has_room(const GpuLane& lane, const GpuJob& job) const {
  if (job.staged()) return true;  // bounded by the slots
  // Layers of staged loads are announced by this thread. Words that a stream writes meanwhile could be moved
  // back by it.
  if (lane.staged > 0 && job.layer_fences() != nullptr) return false;
  return lane.in_flight.size() < kChunksPerStream * lane.direct_streams;
}

void GpuTransfers::Impl::put_in_flight(GpuLane& lane, GpuChunk chunk) {
  ++lane.turn;
  if (chunk.job->base().verdict == Status::ok && chunk.job->all_enqueued()) {
    chunk.owner = std::move(lane.queue.front());
    lane.queue.pop_front();
  }
  lane.in_flight.push_back(std::move(chunk));
}

bool GpuTransfers::Impl::feed_staged(GpuLane& lane, GpuJob& job) {
  GpuChunk chunk;
  chunk.event = take_event();
  if (chunk.event == nullptr) return true;  // broken down
  chunk.stream = lane.stream(true);
  CUresult error = CUDA_SUCCESS;
  if (!begin_staged(chunk, job, pool, error)) {
    spare_events.push_back(chunk.event);
    return false;
  }
  if (error != CUDA_SUCCESS) break_down(error, "cuEventRecord");
  ++lane.staged;
  put_in_flight(lane, std::move(chunk));
  return true;
}

// One look at every lane, each turn beginning with another one.
bool GpuTransfers::Impl::turn(std::uint64_t now) {
  bool any = false;
  for (ActiveLane& entry : active) {
    any |= move(*entry.lane);
    any |= reap(*entry.lane);
    any |= feed(*entry.lane, now);
  }
  std::erase_if(active, [](ActiveLane& entry) {
    if (!entry.lane->queue.empty() || !entry.lane->in_flight.empty()) return false;
    entry.lane->active = false;
    return true;
  });
  if (active.size() > 1) std::rotate(active.begin(), active.begin() + 1, active.end());
  return any;
}

}  // namespace hicache::daemon
