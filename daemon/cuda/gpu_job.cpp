#include "daemon/cuda/gpu_job.hpp"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

#include "daemon/cuda/batched_copy.hpp"
#include "daemon/cuda/gpu_memory.hpp"

namespace hicache::daemon {
namespace {

// A chunk is at most this long, so that ranks take turns and a cancelled transfer ends soon.
constexpr std::uint64_t kChunkBytes = 8 * kMiB;
constexpr std::uint32_t kChunkCopies = 64;
// Of the methods that copy piece by piece.
constexpr std::uint32_t kChunkPieces = 2048;
// Pages of a page-major part: bounds the plan's memory.
constexpr std::size_t kPagesPerPart = 256;

bool fits(std::uint64_t offset, std::uint64_t width, std::uint64_t rows, std::uint64_t pitch,
          std::uint64_t size) {
  std::uint64_t extent = 0;
  if (__builtin_mul_overflow(rows - 1, pitch, &extent)) return false;
  if (__builtin_add_overflow(extent, width, &extent)) return false;
  return extent <= size && offset <= size - extent;
}

// Pitched runs become their rows.
void split_rows(CopyPlan& plan) {
  std::vector<CopyRun> rows;
  for (CopyRun run : plan.runs) {
    const std::uint64_t count = std::exchange(run.rows, 1);
    const std::uint64_t device_pitch = std::exchange(run.device_pitch, run.width);
    const std::uint64_t host_pitch = std::exchange(run.host_pitch, run.width);
    for (std::uint64_t row = 0; row < count; ++row) {
      rows.push_back(run);
      run.device_offset += device_pitch;
      run.host_offset += host_pitch;
    }
  }
  plan.runs = std::move(rows);
}

bool by_pieces(TransferMethod method) {
  return method == TransferMethod::contiguous || method == TransferMethod::batched;
}

}  // namespace

GpuJob::GpuJob(TransferJobPtr job) : job_(std::move(job)) {
  if (job_->transfer.memory == nullptr) return;
  layers_ = job_->transfer.memory->spec.layers;
  find_pool_end();
}

void GpuJob::find_pool_end() {
  pool_end_ = 0;
  const std::uint64_t shard = job_->transfer.memory->spec.shard_bytes();
  for (const PagePair& page : job_->transfer.pages) pool_end_ = std::max(pool_end_, page.host.value + shard);
}

void GpuJob::take_part() {
  is_part_ = true;
  const std::uint32_t rank = job_->transfer.group->rank;
  ExchangePart part = exchange_->take_part(rank);
  job_->transfer.pages = std::move(part.pages);
  find_pool_end();
  if (!part.targets.empty()) {
    pass_on_.emplace(*exchange_, *job_->transfer.memory, job_->transfer.pages, std::move(part.passed),
                     std::move(part.targets));
  }
}

// What is passed on follows part by part, so parts are small: the last ones end soon after their arrival.
std::size_t GpuJob::pages_per_part() const {
  if (!pass_on_) return kPagesPerPart;
  const NamespaceSpec& spec = job_->transfer.memory->spec;
  const std::uint64_t page = (group_end_ - group_first_) * spec.kinds() * spec.piece_bytes();
  return std::clamp<std::uint64_t>(kChunkBytes / page, 1, kPagesPerPart);
}

const GpuMemory& GpuJob::memory() const {
  return static_cast<const GpuMemory&>(*job_->transfer.memory->device);
}

LayerFences* GpuJob::layer_fences() const {
  if (!job_->announces_layers()) return nullptr;
  return &job_->transfer.memory->fences->load[job_->transfer.fence];
}

void GpuJob::fail(CUresult result, const char* what) {
  job_->verdict = Status::system_error;
  spdlog::error("transfer {}: {}", job_->transfer.id.value,
                cuda_error(memory().gpu().driver(), result, what).message);
}

void GpuJob::begin(const GpuPool& pool) {
  if (begun_) return;
  begun_ = true;
  TransferOptions options;
  options.pool_bytes = pool.bytes;
  job_->start(options);
  const auto& pages = job_->transfer.pages;
  const bool announces = is_part_ ? exchange_->announces_layers() : job_->announces_layers();
  // What is passed on to other GPUs is copied from the rank's own pages behind its copies: they are not
  // staged.
  schedule_ = memory().schedules().choose(count_page_runs(pages), announces, !is_part_ && !pages.empty());
  group_end_ = std::min(schedule_.first_group, layers_);
}

ChunkWork GpuJob::next_staged(StagedChunk& chunk) {
  const NamespaceSpec& spec = job_->transfer.memory->spec;
  const std::size_t pages = job_->transfer.pages.size();
  chunk =
      next_staged_chunk(spec, group_first_, group_end_, part_first_, pages, memory().staging()->slot_bytes());
  ChunkWork work;
  work.bytes =
      (chunk.end_page - chunk.first_page) * staged_row_bytes(spec, chunk.end_layer - chunk.first_layer);
  part_first_ = chunk.end_page;
  if (part_first_ < pages) return work;
  part_first_ = 0;
  if (job_->announces_layers()) {
    work.first_layer = chunk.first_layer;
    work.end_layer = chunk.end_layer;
  }
  group_first_ = chunk.end_layer;
  if (group_first_ == group_end_) group_end_ = std::min(group_first_ + schedule_.group, layers_);
  return work;
}

std::uint32_t GpuJob::enqueue_staged(const GpuPool& pool, const StagedChunk& chunk, std::uint32_t slot,
                                     CUstream stream) {
  const StagingRing& ring = *memory().staging();
  const auto pages = std::span<const PagePair>(job_->transfer.pages)
                         .subspan(chunk.first_page, chunk.end_page - chunk.first_page);
  plan_staged_copies(job_->transfer.memory->spec, chunk, pages, slot * ring.slot_bytes(), pool.border_bytes,
                     job_->plan);
  const std::uint64_t bytes = kStagingSlots * ring.slot_bytes();
  for (const CopyRun& run : job_->plan.runs) put_copy(pool, memory().staging_address(), bytes, run, stream);
  return static_cast<std::uint32_t>(job_->plan.runs.size());
}

void GpuJob::plan_part(const GpuPool& pool) {
  const RankMemory& rank = *job_->transfer.memory;
  const std::span<const PagePair> pages(job_->transfer.pages);
  next_run_ = 0;
  planned_ = true;
  if (schedule_.order == PlanOrder::layer_major) {
    part_end_ = pages.size();
    plan_layer(rank.spec, rank.geometry, pages, group_first_, pool.border_bytes, job_->plan);
  } else {
    part_end_ = std::min(part_first_ + pages_per_part(), pages.size());
    plan_group(rank.spec, rank.geometry, pages.subspan(part_first_, part_end_ - part_first_), group_first_,
               group_end_, pool.border_bytes, job_->plan);
  }
  if (by_pieces(memory().method())) split_rows(job_->plan);
}

void GpuJob::end_part(ChunkWork& chunk) {
  planned_ = false;
  if (pass_on_) pass_on_->note({group_first_, group_end_, part_first_, part_end_});
  part_first_ = part_end_;
  if (part_end_ < job_->transfer.pages.size()) return;
  part_first_ = 0;
  if (ends_layers()) {
    if (chunk.end_layer == 0) chunk.first_layer = group_first_;
    chunk.end_layer = group_end_;
  }
  group_first_ = group_end_;
  group_end_ = std::min(group_first_ + schedule_.group, layers_);
}

void GpuJob::announce(const ChunkWork& chunk, CUstream stream) {
  LayerFences* fences = layer_fences();
  const CudaDriver& driver = memory().gpu().driver();
  for (std::uint32_t layer = chunk.first_layer; layer < chunk.end_layer; ++layer) {
    const CUdeviceptr word = memory().fence_address(fences->layer[layer]);
    if (word == 0) return;
    // SYNC layer: without a flag the write is ordered behind the bytes of the stream's copies.
    const CUresult r =
        driver.cuStreamWriteValue32(stream, word, job_->transfer.fence_value, CU_STREAM_WRITE_VALUE_DEFAULT);
    if (r != CUDA_SUCCESS) return fail(r, "cuStreamWriteValue32");
  }
}

void GpuJob::put_copy(const GpuPool& pool, CUdeviceptr device_base, std::uint64_t device_bytes,
                      const CopyRun& run, CUstream stream) {
  if (!fits(run.device_offset, run.width, run.rows, run.device_pitch, device_bytes) ||
      !fits(run.host_offset, run.width, run.rows, run.host_pitch, pool.bytes)) {
    job_->verdict = Status::internal;
    return;
  }
  const CudaDriver& driver = memory().gpu().driver();
  const CUdeviceptr device = device_base + run.device_offset;
  std::uint8_t* host = pool.data + run.host_offset;
  const bool load = job_->transfer.direction == Direction::load;
  CUresult r = CUDA_SUCCESS;
  if (run.rows == 1) {
    r = load ? driver.cuMemcpyHtoDAsync(device, host, run.width, stream)
             : driver.cuMemcpyDtoHAsync(host, device, run.width, stream);
  } else {
    CUDA_MEMCPY2D copy{};
    copy.WidthInBytes = run.width;
    copy.Height = run.rows;
    if (load) {
      copy.srcMemoryType = CU_MEMORYTYPE_HOST;
      copy.srcHost = host;
      copy.srcPitch = run.host_pitch;
      copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
      copy.dstDevice = device;
      copy.dstPitch = run.device_pitch;
    } else {
      copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
      copy.srcDevice = device;
      copy.srcPitch = run.device_pitch;
      copy.dstMemoryType = CU_MEMORYTYPE_HOST;
      copy.dstHost = host;
      copy.dstPitch = run.host_pitch;
    }
    r = driver.cuMemcpy2DAsync(&copy, stream);
  }
  if (r != CUDA_SUCCESS) fail(r, run.rows == 1 ? "copy" : "pitched copy");
}

void GpuJob::put_batch(const GpuPool& pool, std::span<const CopyRun> runs, CUstream stream) {
  const RankMemory& rank = *job_->transfer.memory;
  const bool load = job_->transfer.direction == Direction::load;
  std::vector<CUdeviceptr> from;
  std::vector<CUdeviceptr> to;
  std::vector<std::size_t> bytes;
  for (const CopyRun& run : runs) {
    if (!fits(run.device_offset, run.width, 1, run.width, rank.geometry.allocations[run.allocation].bytes) ||
        !fits(run.host_offset, run.width, 1, run.width, pool.bytes)) {
      job_->verdict = Status::internal;
      return;
    }
    const CUdeviceptr device = memory().range(run.allocation) + run.device_offset;
    const auto host = static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(pool.data + run.host_offset));
    from.push_back(load ? host : device);
    to.push_back(load ? device : host);
    bytes.push_back(run.width);
  }
  const CUresult r = copy_batch(memory().gpu().driver(), to, from, bytes, stream);
  if (r != CUDA_SUCCESS) fail(r, "batched copy");
}

ChunkWork GpuJob::enqueue(const GpuPool& pool, CUstream stream) {
  ChunkWork chunk;
  const TransferMethod method = memory().method();
  const std::uint32_t most = by_pieces(method) ? kChunkPieces : kChunkCopies;
  try {
    while (job_->verdict == Status::ok && !all_enqueued() && chunk.bytes < kChunkBytes &&
           chunk.copies < most) {
      if (!planned_) plan_part(pool);
      const auto& runs = job_->plan.runs;
      const std::size_t first = next_run_;
      while (next_run_ < runs.size() && chunk.bytes < kChunkBytes && chunk.copies < most &&
             job_->verdict == Status::ok) {
        const CopyRun& run = runs[next_run_++];
        if (method != TransferMethod::batched) {
          put_copy(pool, memory().range(run.allocation),
                   job_->transfer.memory->geometry.allocations[run.allocation].bytes, run, stream);
        }
        chunk.bytes += run.bytes();
        ++chunk.copies;
      }
      if (method == TransferMethod::batched && next_run_ > first)
        put_batch(pool, std::span(runs).subspan(first, next_run_ - first), stream);
      if (job_->verdict == Status::ok && next_run_ == runs.size()) end_part(chunk);
    }
  } catch (const std::exception&) {
    // Out of memory for a plan: this transfer fails, the others go on.
    job_->verdict = Status::internal;
  }
  return chunk;
}

}  // namespace hicache::daemon
