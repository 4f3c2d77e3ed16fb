#include "daemon/transfer/transfer_job.hpp"

#include <algorithm>
#include <exception>

#include "shm/crash_points.hpp"
#include "shm/layer_fences.hpp"

namespace hicache::daemon {
namespace {

// Pages that are planned together when no layer order is asked for: plenty to coalesce, and a bound on the
// plan's memory (4096 tensors at most, 72 bytes a run).
constexpr std::size_t kPagesPerPart = 256;

}  // namespace

void TransferJob::admit() {
  const std::uint32_t words = transfer.direction == Direction::write ? kWriteFences : kProducerSlots;
  const bool fenced = transfer.fence != Submission::kNoFence;
  const bool sound = transfer.memory != nullptr && transfer.memory->spec.layers <= kMaxLayers &&
                     (!fenced || (transfer.memory->fences != nullptr && transfer.fence < words));
  if (sound) return;
  verdict = Status::invalid_argument;
  transfer.fence = Submission::kNoFence;
}

bool TransferJob::may_start() const {
  if (transfer.direction == Direction::load || transfer.fence == Submission::kNoFence) return true;
  // Acquire pairs with the release store of Session::raise_write_fence: the rank's bytes are there.
  const std::uint32_t reached =
      transfer.memory->fences->write[transfer.fence].value.load(std::memory_order_acquire);
  return timeline_reached(reached, transfer.fence_value);
}

bool TransferJob::announces_layers() const {
  return transfer.direction == Direction::load && transfer.fence != Submission::kNoFence;
}

void TransferJob::start(const TransferOptions& options) {
  started = true;
  const RankMemory& memory = *transfer.memory;
  const std::uint64_t shard_bytes = memory.spec.shard_bytes();
  for (const PagePair& page : transfer.pages) {
    if (page.device.value >= memory.geometry.pages ||
        (page.state && page.state.value >= memory.geometry.states)) {
      verdict = Status::invalid_argument;
      return;
    }
    if (shard_bytes > options.pool_bytes || page.host.value > options.pool_bytes - shard_bytes) {
      verdict = Status::internal;
      return;
    }
  }
  if (transfer.direction == Direction::load && options.checksums != nullptr &&
      options.checksums->verifies_loads()) {
    verify(*options.checksums);
  }
  sort_pages(transfer.pages);
  HICACHE_CRASH_POINT(copy_started);
}

// Before the first byte is copied: a layer that was announced can't be taken back.
void TransferJob::verify(const ShardChecksums& checksums) {
  const std::uint64_t shard_bytes = transfer.memory->spec.shard_bytes();
  for (const PagePair& page : transfer.pages) {
    ++verified;
    if (!checksums.matches(page.host, shard_bytes)) corrupt.push_back(page.host);
  }
  if (!corrupt.empty()) verdict = Status::corrupt;
}

// Plans the next part; false when there is none.
bool TransferJob::plan_part(const TransferOptions& options) {
  const RankMemory& memory = *transfer.memory;
  next_run_ = 0;
  if (announces_layers()) {
    if (next_part_ >= memory.spec.layers) return false;
    plan_layer(memory.spec, memory.geometry, transfer.pages, static_cast<std::uint32_t>(next_part_),
               options.border_bytes, plan);
    return true;
  }
  const std::size_t first = next_part_ * kPagesPerPart;
  if (first >= transfer.pages.size()) return false;
  const std::size_t count = std::min(kPagesPerPart, transfer.pages.size() - first);
  plan_pages(memory.spec, memory.geometry, std::span<const PagePair>(transfer.pages).subspan(first, count),
             options.border_bytes, plan);
  return true;
}

void TransferJob::end_part() {
  if (announces_layers()) {
    raise_layer(transfer.memory->fences->load[transfer.fence], static_cast<std::uint32_t>(next_part_),
                transfer.fence_value);
    HICACHE_CRASH_POINT(load_layer_announced);
  }
  ++next_part_;
  plan.runs.clear();
  next_run_ = 0;
}

bool TransferJob::advance(DeviceBackend& backend, const TransferOptions& options,
                          std::uint64_t slice_bytes) try {
  if (verdict != Status::ok) return true;
  bool planned = started && next_run_ < plan.runs.size();
  if (!started) start(options);
  const std::uint64_t slice_end = bytes + slice_bytes;
  while (verdict == Status::ok) {
    if (!planned && !plan_part(options)) return true;
    planned = false;
    for (; next_run_ < plan.runs.size(); ++next_run_) {
      if (bytes >= slice_end) return false;
      const CopyRun& run = plan.runs[next_run_];
      verdict = backend.copy(*transfer.memory, transfer.direction, run);
      if (verdict != Status::ok) return true;
      bytes += run.bytes();
    }
    end_part();
  }
  return true;
} catch (const std::exception&) {
  // Out of memory for a plan: this transfer fails, the thread and the others go on.
  verdict = Status::internal;
  return true;
}

TransferDone TransferJob::finish(const TransferOptions& options) {
  HICACHE_CRASH_POINT(copy_landed);
  if (verdict != Status::ok && announces_layers()) {
    fail_layers(transfer.memory->fences->load[transfer.fence], transfer.memory->spec.layers,
                transfer.fence_value);
  }
  if (verdict == Status::ok && transfer.direction == Direction::write && options.checksums != nullptr) {
    for (const PagePair& page : transfer.pages) {
      options.checksums->record(page.host, transfer.memory->spec.shard_bytes());
    }
  }
  transfer.memory.reset();
  return TransferDone{transfer.id, verdict, bytes, verified, std::move(corrupt)};
}

}  // namespace hicache::daemon
