#include "daemon/transfer/staging_ring.hpp"

#include <cassert>
#include <string>
#include <utility>

#include "shm/futex.hpp"
#include "shm/waiting.hpp"

namespace hicache::daemon {

Result<StagingRing> StagingRing::map(int fd, std::uint64_t slot_bytes, std::uint32_t blocks) {
  if (slot_bytes < kMinStagingSlotBytes || slot_bytes > kMaxStagingSlotBytes || slot_bytes % 4096 != 0) {
    return Error{Status::invalid_argument,
                 "staging slots of " + std::to_string(slot_bytes) +
                     " bytes, expected a multiple of 4 KiB from 64 KiB to 256 MiB",
                 0};
  }
  const auto size = sealed_size(fd);
  if (!size) return Error{size.status(), "staging block: " + size.error().message, 0};
  if (*size != kStagingBlockBytes) {
    return Error{Status::invalid_argument,
                 "staging block of " + std::to_string(*size) + " bytes, expected " +
                     std::to_string(kStagingBlockBytes),
                 0};
  }
  auto mapping = Mapping::map(fd, *size, Mapping::Access::read_write, true);
  if (!mapping) return mapping.error();
  return StagingRing(std::move(*mapping), slot_bytes, blocks);
}

std::optional<std::uint32_t> StagingRing::take(Direction direction) {
  const std::uint32_t first = first_staging_slot(direction == Direction::load);
  for (std::uint32_t slot = first; slot < first + kStagingSlotsPerDirection; ++slot) {
    if (taken_[slot]) continue;
    taken_[slot] = true;
    return slot;
  }
  return std::nullopt;
}

void StagingRing::give_back(std::uint32_t slot) {
  assert(taken_[slot]);
  taken_[slot] = false;
}

void StagingRing::post(std::uint32_t slot, const StagingRequest& request) {
  assert(taken_[slot] && request.pages.size() <= kStagingChunkPages);
  StagingSlot& s = block().slots[slot];
  constexpr auto relaxed = std::memory_order_relaxed;
  s.first_layer.store(request.first_layer, relaxed);
  s.end_layer.store(request.end_layer, relaxed);
  s.pages.store(static_cast<std::uint32_t>(request.pages.size()), relaxed);
  s.blocks.store(blocks_, relaxed);
  for (std::size_t i = 0; i < request.pages.size(); ++i)
    s.page[i].store(request.pages[i].device.value, relaxed);
  numbers_[slot] = next_number_++;
  s.turn.store(staging_turn(numbers_[slot], StagingTurn::posted), std::memory_order_release);  // SYNC staging
  park_fence();  // SYNC staging park
  rouse();
}

void StagingRing::rouse() {
  if (block().asleep.load(std::memory_order_relaxed) == 0) return;
  block().wake.fetch_add(1, std::memory_order_release);
  futex_wake_one(&block().wake);
}

StagingRing::Answer StagingRing::answer(std::uint32_t slot) const {
  const StagingSlot& s = block().slots[slot];
  const auto number = static_cast<std::uint32_t>(numbers_[slot]);
  if (s.done.load(std::memory_order_acquire) != number) return Answer::waiting;  // SYNC staging
  return s.refused.load(std::memory_order_relaxed) == number ? Answer::refused : Answer::done;
}

bool StagingRing::withdraw(std::uint32_t slot) {
  std::uint64_t posted = staging_turn(numbers_[slot], StagingTurn::posted);
  return block().slots[slot].turn.compare_exchange_strong(
      posted, staging_turn(numbers_[slot], StagingTurn::withdrawn), std::memory_order_acq_rel,
      std::memory_order_relaxed);
}

}  // namespace hicache::daemon
