#include "daemon/kernel/kernel_job.hpp"

#include <algorithm>

#include "shm/layer_fences.hpp"

namespace hicache::daemon {

void KernelJob::admit(std::uint64_t pool_bytes) {
  const RankMemory& memory = *transfer.memory;
  const std::uint32_t words = loads() ? kProducerSlots : kWriteFences;
  if (memory.spec.layers > kMaxLayers || transfer.pages.size() > kMaxPagesPerOperation ||
      (transfer.fence != Submission::kNoFence && transfer.fence >= words)) {
    verdict = Status::invalid_argument;
    transfer.fence = Submission::kNoFence;
    return;
  }
  const std::uint64_t shard_bytes = memory.spec.shard_bytes();
  for (const PagePair& page : transfer.pages) {
    if (page.device.value >= memory.geometry.pages ||
        (page.state && page.state.value >= memory.geometry.states)) {
      verdict = Status::invalid_argument;
      return;
    }
    if (shard_bytes > pool_bytes || page.host.value > pool_bytes - shard_bytes) {
      verdict = Status::internal;
      return;
    }
  }
}

std::uint64_t KernelJob::whole_bytes() const {
  const RankMemory& memory = *transfer.memory;
  const auto with_states = static_cast<std::uint64_t>(std::count_if(
      transfer.pages.begin(), transfer.pages.end(), [](const PagePair& page) { return bool(page.state); }));
  std::uint64_t total = 0;
  for (const DeviceTensor& tensor : memory.geometry.tensors)
    total += tensor.page_bytes * (holds_states(memory.spec, tensor) ? with_states : transfer.pages.size());
  return total;
}

bool KernelJob::may_start() const {
  if (loads() || transfer.fence == Submission::kNoFence) return true;
  // Acquire pairs with the release store of Session::raise_write_fence: the rank's bytes are there.
  return timeline_reached(
      transfer.memory->fences->write[transfer.fence].value.load(std::memory_order_acquire),
      transfer.fence_value);
}

void KernelJob::verify(const ShardChecksums* checksums) {
  if (!loads() || checksums == nullptr || !checksums->verifies_loads()) return;
  for (const PagePair& page : transfer.pages) {
    ++verified;
    if (!checksums->matches(page.host, transfer.memory->spec.shard_bytes())) corrupt.push_back(page.host);
  }
  if (!corrupt.empty()) verdict = Status::corrupt;
}

void KernelJob::describe(KernelSlot& slot, std::uint32_t block_quota) const {
  constexpr auto relaxed = std::memory_order_relaxed;  // the turn that is stored behind them is a release
  slot.pages.store(static_cast<std::uint32_t>(transfer.pages.size()), relaxed);
  slot.block_quota.store(block_quota, relaxed);
  slot.fence.store(loads() ? transfer.fence : kNone32, relaxed);
  slot.fence_value.store(loads() ? transfer.fence_value : 0, relaxed);
  for (std::size_t i = 0; i < transfer.pages.size(); ++i) {
    const PagePair& page = transfer.pages[i];
    slot.page[i].pool_offset.store(page.host.value, relaxed);
    slot.page[i].device_page.store(page.device.value, relaxed);
    slot.page[i].state.store(page.state.value, relaxed);
  }
}

TransferDone KernelJob::finish(const ShardChecksums* checksums) {
  const RankMemory& memory = *transfer.memory;
  if (loads() && transfer.fence != Submission::kNoFence) {
    LayerFences& fences = memory.fences->load[transfer.fence];
    if (verdict != Status::ok) {
      fail_layers(fences, memory.spec.layers, transfer.fence_value);
    } else if (transfer.pages.empty()) {
      for (std::uint32_t layer = 0; layer < memory.spec.layers; ++layer)
        raise_layer(fences, layer, transfer.fence_value);
    }
  }
  if (verdict == Status::ok && !loads() && checksums != nullptr) {
    for (const PagePair& page : transfer.pages) checksums->record(page.host, memory.spec.shard_bytes());
  }
  transfer.memory.reset();
  return TransferDone{transfer.id, verdict, bytes, verified, std::move(corrupt)};
}

}  // namespace hicache::daemon
