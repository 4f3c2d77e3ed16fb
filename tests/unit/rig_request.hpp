// A whole request of a group through the coordinator's rig.
#pragma once

#include <optional>

#include "tests/fuzz/coordinator_rig.hpp"
#include "tests/support/catch.hpp"

namespace hicache::fuzz {

// Both ranks reserve hashes [first_hash, first_hash + pages) and write them all; then both release. Returns
// rank 0's completion of the write.
inline Completion run_request(CoordinatorRig& rig, std::uint64_t sequence, std::uint32_t first_hash,
                              std::uint32_t pages) {
  const auto post = [&](Opcode opcode, std::uint64_t sequence_or_lease, std::uint32_t arena_offset) {
    Completion last;
    for (std::uint32_t rank = 0; rank < kTpSize; ++rank) {
      Submission s;
      s.opcode = opcode;
      s.sequence_or_lease = sequence_or_lease;
      s.arena_offset = arena_offset;
      s.count = opcode == Opcode::release ? 0 : pages;
      rig.client(rank).submit(s);
    }
    for (std::uint32_t rank = kTpSize; rank-- > 0;) {
      std::optional<Completion> c;
      while (!(c = rig.client(rank).completions.pop())) rig.settle();
      CHECK(c->status == Status::ok);
      last = *c;
    }
    return last;
  };
  const Completion reserved =
      post(Opcode::reserve, sequence, first_hash * static_cast<std::uint32_t>(sizeof(PrefixHash)));
  const Completion written = post(Opcode::write, reserved.lease, kDeviceListAt);
  post(Opcode::release, reserved.lease, 0);
  return written;
}

}  // namespace hicache::fuzz
