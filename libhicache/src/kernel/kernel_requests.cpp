#include "kernel_requests.hpp"

#include <unistd.h>

#include <algorithm>
#include <iterator>

#include "shm/channel_layout.hpp"
#include "shm/crash_points.hpp"
#include "shm/futex.hpp"
#include "shm/waiting.hpp"

namespace hicache {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

bool is_posted(std::uint64_t turn) {
  return (turn & 3) == static_cast<std::uint64_t>(KernelTurn::posted);
}

}  // namespace

bool KernelRequests::posted() const {
  return std::any_of(std::begin(block_.slots), std::end(block_.slots),
                     [](const KernelSlot& slot) { return is_posted(slot.turn.load(kRelaxed)); });
}

// Copies a request out of shared memory, once; false when it names what is not there.
bool KernelRequests::read(const KernelSlot& slot, KernelWork& work) const {
  work.block_quota = slot.block_quota.load(kRelaxed);
  work.fence = slot.fence.load(kRelaxed);
  work.fence_value = slot.fence_value.load(kRelaxed);
  const std::uint32_t pages = slot.pages.load(kRelaxed);
  if (work.block_quota == 0 || work.block_quota > kMaxBlockQuota) return false;
  if (work.fence != kNone32 && (!work.loads || work.fence >= kProducerSlots)) return false;
  if (pages == 0 || pages > kMaxPagesPerOperation || limits_.shard_bytes > limits_.pool_bytes) return false;
  work.pages.clear();
  work.pages.reserve(pages);
  for (std::uint32_t i = 0; i < pages; ++i) {
    const KernelPage& page = slot.page[i];
    const KernelCopy copy{PoolOffset{page.pool_offset.load(kRelaxed)},
                          DevicePage{page.device_page.load(kRelaxed)}, DevicePage{page.state.load(kRelaxed)}};
    if (copy.host.value > limits_.pool_bytes - limits_.shard_bytes || copy.host.value % kPoolAlignment != 0 ||
        copy.device.value >= limits_.device_pages || (copy.state && copy.state.value >= limits_.states)) {
      return false;
    }
    work.pages.push_back(copy);
  }
  return true;
}

bool KernelRequests::take(bool loads, KernelWork& work) {
  const std::uint32_t first = first_kernel_slot(loads);
  for (;;) {
    std::uint64_t oldest = 0;
    for (std::uint32_t slot = first; slot < first + kKernelSlotsPerDirection; ++slot) {
      const std::uint64_t turn = block_.slots[slot].turn.load(kRelaxed);
      if (!is_posted(turn) || (oldest != 0 && turn >= oldest)) continue;
      oldest = turn;
      work.slot = slot;
    }
    if (oldest == 0) return false;
    KernelSlot& slot = block_.slots[work.slot];
    work.number = oldest >> 2;
    work.loads = loads;
    if (!slot.turn.compare_exchange_strong(oldest, kernel_turn(work.number, KernelTurn::taken),
                                           std::memory_order_acq_rel, kRelaxed)) {  // SYNC kernel block
      continue;                                                                     // withdrawn
    }
    HICACHE_CRASH_POINT(kernel_taken);
    if (read(slot, work)) return true;
    end(KernelEnd{work.slot, work.number, Status::corrupt, 0});
  }
}

void KernelRequests::end(const KernelEnd& end) {
  KernelSlot& slot = block_.slots[end.slot];
  slot.status.store(static_cast<std::uint32_t>(end.status), kRelaxed);
  slot.bytes.store(end.bytes, kRelaxed);
  slot.ended.store(end.number, std::memory_order_release);  // SYNC kernel block
  HICACHE_CRASH_POINT(kernel_reported);
  // A full counter (EAGAIN) has been rung already; nothing else can fail on an eventfd.
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(news_, &one, sizeof one);
  HICACHE_CRASH_POINT(kernel_rung);
}

void KernelRequests::park(std::uint64_t timeout_ns) {
  const std::uint32_t kicks = block_.wake.load(std::memory_order_acquire);
  block_.asleep.store(1, kRelaxed);
  park_fence();  // SYNC kernel park
  HICACHE_CRASH_POINT(kernel_parked);
  if (!posted()) futex_wait(&block_.wake, kicks, timeout_ns);
  block_.asleep.store(0, kRelaxed);
}

void KernelRequests::wake() {
  block_.wake.fetch_add(1, std::memory_order_release);
  futex_wake_all(&block_.wake);
}

}  // namespace hicache
