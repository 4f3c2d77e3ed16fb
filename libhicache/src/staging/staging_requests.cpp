#include "staging_requests.hpp"

#include <algorithm>

#include "shm/futex.hpp"
#include "shm/waiting.hpp"

namespace hicache {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

bool is_posted(std::uint64_t turn) {
  return (turn & 3) == static_cast<std::uint64_t>(StagingTurn::posted);
}

}  // namespace

bool StagingRequests::posted() const {
  return std::any_of(std::begin(block_.slots), std::end(block_.slots),
                     [](const StagingSlot& slot) { return is_posted(slot.turn.load(kRelaxed)); });
}

bool StagingRequests::sound(const StagingWork& work) const {
  if (work.first_layer >= work.end_layer || work.end_layer > limits_.layers) return false;
  if (work.pages == 0 || work.pages > kStagingChunkPages) return false;
  if (work.blocks == 0 || work.blocks > kMaxStagingBlocks) return false;
  const std::uint64_t row = (work.end_layer - work.first_layer) * limits_.layer_bytes;
  if (row > limits_.slot_bytes / work.pages) return false;
  return std::all_of(work.page.begin(), work.page.begin() + work.pages,
                     [&](std::uint32_t page) { return page < limits_.device_pages; });
}

bool StagingRequests::take(bool loads, StagingWork& work) {
  const std::uint32_t first = first_staging_slot(loads);
  for (;;) {
    std::uint64_t oldest = 0;
    for (std::uint32_t slot = first; slot < first + kStagingSlotsPerDirection; ++slot) {
      const std::uint64_t turn = block_.slots[slot].turn.load(kRelaxed);
      if (!is_posted(turn) || (oldest != 0 && turn >= oldest)) continue;
      oldest = turn;
      work.slot = slot;
    }
    if (oldest == 0) return false;
    StagingSlot& slot = block_.slots[work.slot];
    work.number = oldest >> 2;
    if (!slot.turn.compare_exchange_strong(oldest, staging_turn(work.number, StagingTurn::taken),
                                           std::memory_order_acq_rel, kRelaxed)) {  // SYNC staging
      continue;                                                                     // withdrawn
    }
    work.first_layer = slot.first_layer.load(kRelaxed);
    work.end_layer = slot.end_layer.load(kRelaxed);
    work.blocks = slot.blocks.load(kRelaxed);
    work.pages = slot.pages.load(kRelaxed);
    for (std::uint32_t i = 0; i < std::min(work.pages, kStagingChunkPages); ++i)
      work.page[i] = slot.page[i].load(kRelaxed);
    if (sound(work)) return true;
    refuse(work);
  }
}

void StagingRequests::refuse(const StagingWork& work) {
  StagingSlot& slot = block_.slots[work.slot];
  slot.refused.store(static_cast<std::uint32_t>(work.number), kRelaxed);
  slot.done.store(static_cast<std::uint32_t>(work.number), std::memory_order_release);  // SYNC staging
}

bool StagingRequests::park(std::uint64_t timeout_ns) {
  const std::uint32_t kicks = block_.wake.load(std::memory_order_acquire);
  block_.asleep.store(1, kRelaxed);
  park_fence();  // SYNC staging park
  const bool found = posted();
  if (!found) futex_wait(&block_.wake, kicks, timeout_ns);
  block_.asleep.store(0, kRelaxed);
  return found || block_.wake.load(kRelaxed) != kicks;
}

void StagingRequests::wake() {
  block_.wake.fetch_add(1, std::memory_order_release);
  futex_wake_all(&block_.wake);
}

}  // namespace hicache
