// The channel: one sealed memfd per client, shared by exactly that client and the daemon.
//
//   0      ChannelHeader (4 KiB)
//   4 KiB  submission entries, completion entries, fence words, arena; each at a 4 KiB line, found through
//   offsets
//          that the daemon sends in Welcome. Both sides keep private copies of the sizes and never read them
//          here.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "shm/host_page_state.hpp"
#include "shm/protocol.hpp"
#include "shm/region_layout.hpp"
#include "shm/types.hpp"

namespace hicache {

constexpr std::uint64_t kChannelMagic = 0x314e414843434948ull;  // "HICCHAN1"

// One ring slot. The producer fills payload, then stores `sequence` = entry number + 1; a consumer that sees
// it may read the payload. One cache line moves per entry: nobody polls a shared tail.
struct alignas(kCacheLine) RingEntry {
  A64 payload[7];
  A32 sequence;
  A32 reserved0;
};
static_assert(sizeof(RingEntry) == kCacheLine);

struct ChannelHeader {
  A64 magic;
  A64 instance_epoch;
  A32 client_slot;
  A32 client_generation;
  A32 reserved0[2];
  // Written by the client only.
  alignas(kCacheLine) A32 sq_tail;  // for dump and the daemon's sleep check; entries carry their own sequence
  alignas(kCacheLine) A32 cq_head;  // completions read: gives their slots back
  A32 client_waiting;               // 1 while the client sleeps or is about to on cq_wake
  // Written by the daemon only.
  alignas(kCacheLine) A32 sq_head;
  alignas(kCacheLine) A32 cq_tail;
  A32 cq_wake;                              // futex word of the client: grows with every kick
  alignas(kCacheLine) A32 daemon_sleeping;  // 1 while the coordinator sleeps or is about to: kick its eventfd
  A32 session_ended;                        // 1 once the daemon has fenced or dropped this client
  // Tripwires (shm/tripwire.hpp): thread ids of holders that live as long as their process. Only ever waited
  // on.
  alignas(kCacheLine) A32 client_tripwire;  // held by the client, watched by the daemon
  alignas(kCacheLine) A32 daemon_tripwire;  // held by the daemon, watched by the client
  // Written by the client only, for people: pages of its controller by HostPageState, refused transitions.
  alignas(kCacheLine) A32 host_pages[kHostPageStates];
  A32 host_page_refusals;
  A32 host_page_changes;
  A64 last_refusal;                    // RefusedTransition
  A64 host_handles[kShownHandles][2];  // HostHandle, then its key
};
static_assert(sizeof(ChannelHeader) <= 4096);

// Timeline fences: 32-bit words whose values only grow (compared cyclically).
constexpr std::uint32_t kWriteFences = 64;  // rank writes, daemon waits; one per cache line
constexpr std::uint32_t kProducerSlots =
    3;  // layer-ready fences: three loads in flight, as in the seed system
struct alignas(kCacheLine) WriteFenceWord {
  A32 value;
  A32 reserved0[15];
};
static_assert(sizeof(WriteFenceWord) == kCacheLine);
struct alignas(kCacheLine) LayerFences {
  A32 layer[kMaxLayers];  // daemon writes when the layer's last byte has landed
  A32 failed;             // value of the last load that was released without its data
  A32 waiters;            // client: host threads asleep on `wake`
  A32 wake;               // futex word, grows when a layer becomes ready and somebody waits
  A32 reserved0[13];
};
static_assert(sizeof(LayerFences) == 1024 + kCacheLine);
struct FenceBlock {
  WriteFenceWord write[kWriteFences];
  LayerFences load[kProducerSlots];
};

// Sizes and places inside a channel. Made by the daemon, sent in Welcome, checked by the client.
struct ChannelGeometry {
  std::uint32_t sq_entries = 0;  // power of two
  std::uint32_t cq_entries = 0;  // power of two, at least twice sq_entries
  std::uint64_t sq_offset = 0;
  std::uint64_t cq_offset = 0;
  std::uint64_t fence_offset = 0;
  std::uint64_t arena_offset = 0;
  std::uint64_t arena_bytes = 0;
  std::uint64_t total_bytes = 0;

  static ChannelGeometry plan(std::uint32_t sq_entries, std::uint32_t cq_entries, std::uint64_t arena_bytes) {
    ChannelGeometry g;
    g.sq_entries = sq_entries;
    g.cq_entries = cq_entries;
    g.sq_offset = 4096;
    g.cq_offset = align_up(g.sq_offset + std::uint64_t{sq_entries} * sizeof(RingEntry), 4096);
    g.fence_offset = align_up(g.cq_offset + std::uint64_t{cq_entries} * sizeof(RingEntry), 4096);
    g.arena_offset = align_up(g.fence_offset + sizeof(FenceBlock), 4096);
    g.arena_bytes = align_up(arena_bytes, 4096);
    g.total_bytes = g.arena_offset + g.arena_bytes;
    return g;
  }
  [[nodiscard]] bool valid() const {
    auto power_of_two = [](std::uint32_t n) { return n >= 2 && (n & (n - 1)) == 0 && n <= kMaxRingEntries; };
    if (!power_of_two(sq_entries) || !power_of_two(cq_entries) || arena_bytes > (1ull << 31)) return false;
    return *this == plan(sq_entries, cq_entries, arena_bytes);
  }
  friend bool operator==(const ChannelGeometry&, const ChannelGeometry&) = default;
};

}  // namespace hicache
