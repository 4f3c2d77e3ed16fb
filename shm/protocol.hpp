// What travels through the rings: operation codes, submissions, completions. docs/protocol.md explains each.
//
// A submission is untrusted: the daemon copies the 64 bytes once, checks every field of the copy, and uses
// the copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "shm/status.hpp"
#include "shm/types.hpp"

namespace hicache {

// Versions of the socket protocol and of the ring entries that this build speaks.
constexpr std::uint32_t kProtocolMin = 1;
constexpr std::uint32_t kProtocolMax = 1;

// Feature bits of Hello and Welcome.
// A rank may offer staging memory when it registers GPU buffers, and serves the daemon's requests on it.
constexpr std::uint64_t kFeatureStaging = 1;
// io_backend kernel: the rank maps the pool and moves its pages itself (shm/kernel_layout.hpp).
constexpr std::uint64_t kFeatureKernel = 2;
// In force where the client's user may only read (socket.read_only_uids): the library says so by name before
// it asks for what would be refused.
constexpr std::uint64_t kFeatureReadOnly = 4;

enum class Role : std::uint32_t {
  rank = 1,       // owns device buffers, takes part in group decisions
  scheduler = 2,  // reserves for its group, has no device buffers
  tool = 3,       // socket only: no channel, no operations
};

constexpr std::string_view to_string(Role r) {
  switch (r) {
    case Role::rank:
      return "rank";
    case Role::scheduler:
      return "scheduler";
    case Role::tool:
      return "tool";
  }
  return "unknown_role";
}

enum class Opcode : std::uint8_t {
  none = 0,            // never valid: a zeroed entry must not execute
  nop = 1,             // checked, recorded, completed
  reserve = 2,         // pin the leading hits of a chain of hashes; opens a lease
  write = 3,           // device pages to pool pages of a lease
  load = 4,            // pool pages of a lease to device pages
  release = 5,         // this rank is done with a lease
  agree = 6,           // how far the group's operations have ended: one answer for all ranks
  prefetch = 7,        // pages of a lease from storage to pool pages
  check_prefetch = 8,  // may the request run? one answer for all ranks
  end_prefetch = 9,    // the same, and the answer is yes: what has not come by now is given up
  backup = 10,         // ends when storage holds pages of a lease, or is known not to
};
constexpr std::uint8_t kOpcodeCount = 11;

// When a prefetch counts as done, besides the arrival of its last page.
enum class PrefetchPolicy : std::uint32_t {
  best_effort = 0,    // when somebody asks
  wait_complete = 1,  // never
  timeout = 2,        // when its time limit has passed
};

constexpr std::string_view to_string(PrefetchPolicy policy) {
  switch (policy) {
    case PrefetchPolicy::best_effort:
      return "best_effort";
    case PrefetchPolicy::wait_complete:
      return "wait_complete";
    case PrefetchPolicy::timeout:
      return "timeout";
  }
  return "unknown_policy";
}

constexpr std::string_view to_string(Opcode op) {
  switch (op) {
    case Opcode::none:
      return "none";
    case Opcode::nop:
      return "nop";
    case Opcode::reserve:
      return "reserve";
    case Opcode::write:
      return "write";
    case Opcode::load:
      return "load";
    case Opcode::release:
      return "release";
    case Opcode::agree:
      return "agree";
    case Opcode::prefetch:
      return "prefetch";
    case Opcode::check_prefetch:
      return "check_prefetch";
    case Opcode::end_prefetch:
      return "end_prefetch";
    case Opcode::backup:
      return "backup";
  }
  return "unknown_opcode";
}

// 56 bytes; the ring adds the entry sequence. Fields an opcode does not name must be zero.
//
//   opcode          sequence_or_lease   arena_offset -> arena content                    first  count
//   nop             0                   0                                                0      0
//   reserve         group sequence >0   count prefix hashes of 32 bytes                  order  pages
//   write           lease id            count u32 device pages, then count u32 results   page   pages
//   load            lease id            count u32 device pages                           page   pages
//   release         lease id            0                                                0      0
//   agree           agreement number >0 0                                                0      0
//   prefetch        lease id            0                                                page   pages
//   check_prefetch  lease id            0                                                number 0
//   end_prefetch    lease id            0                                                number 0
//   backup          lease id            0                                                page   pages
//
// `order` of a reserve is a SequenceOrder. `number` counts the questions about one prefetch from 1.
// Arena offsets are 8-byte aligned. `first` counts from the request's first page. Results of a write are one
// Status per page as u32, valid when the completion is read: ok = written by this operation, exists = was
// ready already, busy = another lease is filling it, dropped = not kept.
struct Submission {
  std::uint64_t user_data = 0;  // comes back in the completion, never interpreted
  Opcode opcode = Opcode::none;
  std::uint8_t flags = 0;  // kWithStates for write and load, else 0
  std::uint16_t reserved0 = 0;
  std::uint32_t deadline_ms = 0;  // 0 = the daemon's default
  std::uint64_t sequence_or_lease = 0;
  std::uint32_t arena_offset = 0;
  std::uint32_t count = 0;
  std::uint32_t first = 0;
  // write: index of a write fence; load: producer slot of the layer fences; prefetch: a PrefetchPolicy, or
  // kNoFence for the daemon's
  std::uint32_t fence = kNoFence;
  std::uint32_t fence_value = 0;  // write: copy after the fence reached it; load: value stored per layer
  std::uint32_t reserved1 = 0;
  std::uint64_t reserved2 = 0;

  static constexpr std::uint32_t kNoFence = 0xffffffffu;
  // Behind the list of device pages comes one of state slots, as long: where the states of the trailing pools
  // lie that belong to each page, or kNone32.
  static constexpr std::uint8_t kWithStates = 1;
};
static_assert(sizeof(Submission) == 56);

// 56 bytes. Every submission gets exactly one terminal completion (flags without kMore).
struct Completion {
  std::uint64_t user_data = 0;
  Opcode opcode = Opcode::none;
  std::uint8_t flags = 0;
  Status status = Status::ok;
  // reserve: leading pages present and pinned; agree: 1 = the last one's loads failed; prefetch: pages that
  // storage had
  std::uint32_t hits = 0;
  std::uint64_t lease = 0;  // reserve: the lease; else the lease named in the submission
  // write: pages this operation published; prefetch: pages that came; backup: pages that storage holds
  std::uint32_t written = 0;
  // write, prefetch: pages that were ready already; reserve: leading pages present, whether a hit may end
  // with them or not
  std::uint32_t present = 0;
  std::uint32_t filling = 0;  // write: pages another lease is filling; check_prefetch: pages still to come
  std::uint32_t dropped = 0;  // write, prefetch, backup: pages not kept
  std::uint64_t operation_sequence = 0;  // the daemon's global sequence of the submission
  std::uint64_t bytes =
      0;  // write, load: bytes copied for this rank; agree: last group sequence that has ended

  // The operation has ended, but a copy may still touch its device pages: a completion with kPagesReturned
  // and the same user_data follows when the last one has landed.
  static constexpr std::uint8_t kPagesBusy = 1;
  static constexpr std::uint8_t kPagesReturned = 2;  // not a terminal completion
};
static_assert(sizeof(Completion) == 56);

// Hard limits of the layout and protocol; configuration can only tighten them.
constexpr std::uint32_t kMaxPagesPerOperation = 65536;
constexpr std::uint32_t kMaxRingEntries = 32768;
constexpr std::uint32_t kMaxLayers = 256;
constexpr std::uint32_t kMaxTensors = 4096;
constexpr std::uint32_t kMaxAllocations = 1024;
constexpr std::uint64_t kMaxShardBytes = 256 * kMiB;
// Whether agreements wait for a sequence. Each order counts its own sequences.
enum class SequenceOrder : std::uint32_t { agreed = 0, apart = 1 };
// A rank may run this many sequences ahead of the oldest lease of its group.
constexpr std::uint32_t kGroupSequenceWindow = 4096;
// A rank may be this many agreements ahead of the slowest rank of its group.
constexpr std::uint32_t kAgreementWindow = 64;

}  // namespace hicache
