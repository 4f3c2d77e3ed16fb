// The kernel block: how the daemon hands copies to a rank that moves its pages itself (io_backend kernel).
// One sealed memfd a session, made by the daemon, shared by exactly that rank and the daemon.
//
// A request leases pool pages to the rank: reserved ones to fill (writes), pinned ones to read (loads). The
// lease ends when the rank reports the request's number as ended, or when its process is gone; nothing else
// proves that no kernel touches the pages any more.
//
// SYNC kernel block: the daemon writes a request, then stores `turn` as posted with release; the rank moves
//   it to taken with an acquiring exchange and reads the request. Posted may also be withdrawn by the daemon:
//   one of the two exchanges wins, so a request that was withdrawn is never run. The rank stores `status` and
//   `bytes`, then `ended` with release, behind the last byte of the copy; the daemon reads `ended` with
//   acquire before it publishes. Weaker: a page could be visible before its bytes are.
// SYNC kernel park: the rank stores `asleep`, fences, looks for requests again, and sleeps on `wake`; the
//   daemon posts, fences, reads `asleep`, and kicks. One of the two sees the other.
#pragma once

#include <atomic>
#include <cstdint>

#include "shm/protocol.hpp"
#include "shm/region_layout.hpp"
#include "shm/types.hpp"

namespace hicache {

// The first half of the slots carries writes, the second loads: neither waits for the other's.
constexpr std::uint32_t kKernelSlots = 8;
constexpr std::uint32_t kKernelSlotsPerDirection = kKernelSlots / 2;
constexpr std::uint32_t first_kernel_slot(bool loads) {
  return loads ? kKernelSlotsPerDirection : 0;
}
// Blocks of a gather or scatter kernel at most.
constexpr std::uint32_t kMaxBlockQuota = 256;

enum class KernelTurn : std::uint64_t {
  idle = 0,       // the daemon's
  posted = 1,     // to be taken by the rank, or withdrawn
  taken = 2,      // the rank runs it: `ended` follows
  withdrawn = 3,  // never ran
};
constexpr std::uint64_t kernel_turn(std::uint64_t number, KernelTurn turn) {
  return number << 2 | static_cast<std::uint64_t>(turn);
}

// A page to move: the rank's shard of it in the pool, and its place on the device.
struct KernelPage {
  A64 pool_offset;
  A32 device_page;
  A32 state;  // slot of its states in the tensors of trailing pools, or kNone32: not copied
};
static_assert(sizeof(KernelPage) == 16);

struct alignas(kCacheLine) KernelSlot {
  A64 turn;                       // kernel_turn() of the request's number, which grows from 1
  alignas(kCacheLine) A64 ended;  // the rank's: number of the last request that has ended
  A64 bytes;                      // the rank's: copied by it
  A32 status;                     // the rank's: a Status
  A32 reserved0;
  alignas(kCacheLine) A32 pages;  // of `page`
  A32 block_quota;                // blocks of a kernel at most
  A32 fence;                      // load: producer slot of the layer fences, or kNone32
  A32 fence_value;                // load: what each layer's word gets
  alignas(kCacheLine) KernelPage page[kMaxPagesPerOperation];
};
static_assert(sizeof(KernelSlot) % kCacheLine == 0);

struct KernelBlock {
  A32 wake;    // futex word of the rank: grows with every kick
  A32 asleep;  // 1 while the rank's thread sleeps or is about to
  KernelSlot slots[kKernelSlots];
};
constexpr std::uint64_t kKernelBlockBytes = align_up(sizeof(KernelBlock), 4096);

}  // namespace hicache
