#include "daemon/cuda/pass_on.hpp"

#include <algorithm>

#include "daemon/cuda/gpu_memory.hpp"

namespace hicache::daemon {
namespace {

bool fits(std::uint64_t offset, std::uint64_t width, std::uint64_t rows, std::uint64_t pitch,
          std::uint64_t size) {
  std::uint64_t extent = 0;
  if (__builtin_mul_overflow(rows - 1, pitch, &extent)) return false;
  if (__builtin_add_overflow(extent, width, &extent)) return false;
  return extent <= size && offset <= size - extent;
}

const GpuMemory& device_of(const RankMemory& memory) {
  return static_cast<const GpuMemory&>(*memory.device);
}

}  // namespace

PassOn::PassOn(const Exchange& exchange, const RankMemory& own, const std::vector<PagePair>& pages,
               std::vector<std::uint32_t> passed, std::vector<PassTarget> targets)
    : own_(own), passed_(std::move(passed)), targets_(std::move(targets)) {
  for (const std::uint32_t index : passed_) from_.push_back(pages[index].device);
  for (const PassTarget& target : targets_) {
    memories_.push_back(&exchange.memory(target.rank));
    streams_.push_back(device_of(own_).pass_stream(memories_.back()->device->device_index));
  }
}

void PassOn::note(const Piece& piece) {
  const auto first = std::lower_bound(passed_.begin(), passed_.end(), piece.first_page);
  if (first != passed_.end() && *first < piece.end_page) noted_.push_back(piece);
}

CUresult PassOn::put_copy(const GpuMemory& to, const RankMemory& to_rank, const PeerRun& run,
                          CUstream stream) const {
  const std::uint64_t from_size = own_.geometry.allocations[run.from_allocation].bytes;
  const std::uint64_t to_size = to_rank.geometry.allocations[run.to_allocation].bytes;
  if (!fits(run.from_offset, run.width, run.rows, run.from_pitch, from_size) ||
      !fits(run.to_offset, run.width, run.rows, run.to_pitch, to_size))
    return CUDA_ERROR_INVALID_VALUE;
  const GpuMemory& from = device_of(own_);
  const CudaDriver& driver = from.gpu().driver();
  const CUdeviceptr source = from.range(run.from_allocation) + run.from_offset;
  // The address that the receiver's memory has in this GPU's context.
  const CUdeviceptr target = to.range_in(from.device_index, run.to_allocation) + run.to_offset;
  if (run.rows == 1) return driver.cuMemcpyDtoDAsync(target, source, run.width, stream);
  CUDA_MEMCPY2D copy{};
  copy.WidthInBytes = run.width;
  copy.Height = run.rows;
  copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = source;
  copy.srcPitch = run.from_pitch;
  copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.dstDevice = target;
  copy.dstPitch = run.to_pitch;
  return driver.cuMemcpy2DAsync(&copy, stream);
}

void PassOn::put_piece(const Piece& piece, const PassTarget& target, CUstream stream, Put& done) {
  const auto at = static_cast<std::size_t>(&target - targets_.data());
  const auto first = std::lower_bound(passed_.begin(), passed_.end(), piece.first_page) - passed_.begin();
  const auto end = std::lower_bound(passed_.begin(), passed_.end(), piece.end_page) - passed_.begin();
  const auto count = static_cast<std::size_t>(end - first);
  runs_.clear();
  plan_peer_copies(own_.spec, own_.geometry, memories_[at]->geometry,
                   std::span(from_).subspan(static_cast<std::size_t>(first), count),
                   std::span(target.pages).subspan(static_cast<std::size_t>(first), count), piece.first_layer,
                   piece.end_layer, runs_);
  for (const PeerRun& run : runs_) {
    done.result = put_copy(device_of(*memories_[at]), *memories_[at], run, stream);
    done.what = "copy from GPU to GPU";
    if (done.result != CUDA_SUCCESS) return;
    done.bytes += run.bytes();
    ++done.copies;
  }
}

PassOn::Put PassOn::put(CUstream own_stream, CUevent handover) {
  const CudaDriver& driver = device_of(own_).gpu().driver();
  Put done;
  done.last = streams_.front();
  std::vector<CUstream> distinct = streams_;
  std::sort(distinct.begin(), distinct.end());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());

  // A wait keeps what the event stood for when it was put: one event serves them all.
  CUresult ordered = driver.cuEventRecord(handover, own_stream);
  for (const CUstream stream : distinct) {
    if (ordered == CUDA_SUCCESS) ordered = driver.cuStreamWaitEvent(stream, handover, CU_EVENT_WAIT_DEFAULT);
  }
  done.result = ordered;
  done.what = "putting streams of two GPUs in order";
  for (const Piece& piece : noted_) {
    for (std::size_t t = 0; t < targets_.size() && done.result == CUDA_SUCCESS; ++t)
      put_piece(piece, targets_[t], streams_[t], done);
  }
  noted_.clear();
  for (const CUstream stream : distinct) {
    if (stream == done.last || ordered != CUDA_SUCCESS) continue;
    ordered = driver.cuEventRecord(handover, stream);
    if (ordered == CUDA_SUCCESS)
      ordered = driver.cuStreamWaitEvent(done.last, handover, CU_EVENT_WAIT_DEFAULT);
  }
  if (ordered != CUDA_SUCCESS) {
    done.result = ordered;
    done.last = nullptr;
  }
  return done;
}

}  // namespace hicache::daemon
