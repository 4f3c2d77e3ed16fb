// How a GPU's transfers end: checksums, and what is reported.
#include <utility>

#include "daemon/cuda/gpu_transfers_impl.hpp"

namespace hicache::daemon {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

std::shared_ptr<ChecksumBatch> batch_of(const Transfer& transfer) {
  auto batch = std::make_shared<ChecksumBatch>();
  batch->shard_bytes = transfer.memory->spec.shard_bytes();
  batch->shards.reserve(transfer.pages.size());
  for (const PagePair& page : transfer.pages) batch->shards.push_back(page.host);
  return batch;
}

}  // namespace

// Before the first byte is copied: a layer that was announced can't be taken back.
void GpuTransfers::Impl::begin_comparing(GpuJob& job) {
  TransferJob& base = job.base();
  if (!checksums || !checksums->policy().verifies_loads()) return;
  if (base.verdict != Status::ok || base.transfer.direction != Direction::load) return;
  if (job.pool_end() > pool.bytes) return;  // it is refused when it begins
  job.comparing = batch_of(base.transfer);
  job.comparing->compare = true;
  job.comparing->done = [this](ChecksumBatch&) { bell->ring(); };
  checksums->submit(job.comparing);
}

bool GpuTransfers::Impl::still_comparing(GpuJob& job) const {
  if (job.comparing == nullptr) return false;
  if (job.comparing->left.load(std::memory_order_acquire) != 0) return true;  // pairs with the last slice
  TransferJob& base = job.base();
  base.verified = static_cast<std::uint32_t>(job.comparing->shards.size());
  base.corrupt = std::move(job.comparing->corrupt);
  if (!base.corrupt.empty() && base.verdict == Status::ok) base.verdict = Status::corrupt;
  job.comparing.reset();
  return false;
}

void GpuTransfers::Impl::finish(GpuJobPtr job) {
  if (job->is_part()) return finish_part(std::move(job));
  const TransferJob& base = job->base();
  if (!checksums || base.verdict != Status::ok || base.transfer.direction == Direction::load)
    return report(*job);
  auto batch = batch_of(base.transfer);
  batch->done = [this, ended = std::shared_ptr<GpuJob>(std::move(job))](ChecksumBatch&) { report(*ended); };
  checksums->submit(std::move(batch));
}

// On this thread, or a checksum thread.
void GpuTransfers::Impl::report(GpuJob& job) {
  const Direction direction = job.base().transfer.direction;
  const TransferDone done = job.base().finish(TransferOptions{});
  counters.transfers.fetch_add(1, kRelaxed);
  if (done.status != Status::ok) counters.failed.fetch_add(1, kRelaxed);
  (direction == Direction::load ? counters.bytes_loaded : counters.bytes_written)
      .fetch_add(done.bytes, kRelaxed);
  sink(done);
}

// The load has ended when all ranks' parts have: the last one reports it for all.
void GpuTransfers::Impl::finish_part(GpuJobPtr job) {
  counters.transfers.fetch_add(1, kRelaxed);
  if (job->base().verdict != Status::ok) counters.failed.fetch_add(1, kRelaxed);
  counters.bytes_loaded.fetch_add(job->base().bytes, kRelaxed);
  const std::uint32_t rank = job->base().transfer.group->rank;
  const auto ended = job->exchange()->part_ended(rank, job->release_base());
  if (!ended.empty()) exchanges.count_end(ended.front().status);
  job.reset();
  for (const TransferDone& done : ended) sink(done);
}

}  // namespace hicache::daemon
