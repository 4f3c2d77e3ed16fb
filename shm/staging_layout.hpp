// The staging block: how the daemon asks a rank to pack pages into its staging memory, or to unpack them from
// it. One sealed memfd for each registration, made by the rank, shared by exactly that rank and the daemon.
//
// Staging memory is device memory of the rank, cut in kStagingSlots equal slots. A write's chunk is packed
// into a slot by the rank's GPU and copied to the pool by the daemon; a load's chunk is copied into a slot by
// the daemon and unpacked by the rank's GPU. In a slot lies a row for each page: K of the chunk's layers,
// then V of them, as in a host page's shard.
//
// SYNC staging: the daemon writes a request, then stores `turn` as posted with release; the rank moves it to
//   taken with an acquiring exchange and reads the request. Posted may also be withdrawn by the daemon: one
//   of the two exchanges wins, so a request that was withdrawn is never run. The rank's stream writes `done`
//   behind its kernel with the driver's memory barrier; the daemon reads it with acquire before it copies
//   from the slot or calls the pages loaded. Weaker: a copy could take bytes that are not packed yet.
// SYNC staging park: the rank stores `asleep`, fences, looks for requests again, and sleeps on `wake`; the
//   daemon posts, fences, reads `asleep`, and kicks. One of the two sees the other.
#pragma once

#include <atomic>
#include <cstdint>

#include "shm/protocol.hpp"
#include "shm/region_layout.hpp"
#include "shm/types.hpp"

namespace hicache {

// The first half of the slots carries writes, the second loads: neither waits for the other's.
constexpr std::uint32_t kStagingSlots = 16;
constexpr std::uint32_t kStagingSlotsPerDirection = kStagingSlots / 2;
constexpr std::uint32_t first_staging_slot(bool loads) {
  return loads ? kStagingSlotsPerDirection : 0;
}
// Pages of a chunk at most: a request travels to the GPU as kernel parameters, which have 4 KiB.
constexpr std::uint32_t kStagingChunkPages = 896;
constexpr std::uint32_t kMaxStagingBlocks = 256;
constexpr std::uint64_t kMinStagingSlotBytes = 64 * kKiB;
constexpr std::uint64_t kMaxStagingSlotBytes = 256 * kMiB;

enum class StagingTurn : std::uint64_t {
  idle = 0,       // the daemon's
  posted = 1,     // to be taken by the rank, or withdrawn
  taken = 2,      // the rank runs it: `done` follows
  withdrawn = 3,  // never ran
};
constexpr std::uint64_t staging_turn(std::uint64_t number, StagingTurn turn) {
  return number << 2 | static_cast<std::uint64_t>(turn);
}

struct alignas(kCacheLine) StagingSlot {
  A64 turn;                      // staging_turn() of the request's number, which grows from 1
  alignas(kCacheLine) A32 done;  // the rank's: low bits of the last number that has ended
  A32 refused;                   // the rank's: low bits of the last number that ended without having run
  alignas(kCacheLine) A32 first_layer;  // layers [first_layer, end_layer)
  A32 end_layer;
  A32 pages;   // of `page`
  A32 blocks;  // of the kernel
  A32 reserved0[4];
  A32 page[kStagingChunkPages];  // device pages, in the slot's order
};
static_assert(sizeof(StagingSlot) % kCacheLine == 0);

struct StagingBlock {
  A32 wake;    // futex word of the rank: grows with every kick
  A32 asleep;  // 1 while the rank's thread sleeps or is about to
  StagingSlot slots[kStagingSlots];
};
constexpr std::uint64_t kStagingBlockBytes = align_up(sizeof(StagingBlock), 4096);

}  // namespace hicache
