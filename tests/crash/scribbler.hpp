// A rank in io_backend kernel at its worst: it never stops writing to the pages that it has been leased.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "tests/support/catch.hpp"
#include "tests/support/raw_rank.hpp"

namespace hicache::test {

constexpr std::uint32_t kLeased = 6;  // pages

// A rank that writes a page in order, takes a request to write kLeased more, says so, and then writes to
// the pages it was leased for as long as it lives.
inline Child scribbler(const TestDaemon& daemon) {
  return Child::run([&] {
    const auto spec = small_spec(Attention::mha, 1);
    RawRank rank(daemon, "scribbler", 0, spec, true, kFeatureKernel);
    const std::uint64_t lease = rank.run(rank.reserve(1, prompt(900, kLeased))).lease;
    rank.post(rank.transfer(Opcode::write, lease, 0, kLeased));
    const KernelSlot& slot = rank.kernel_slot(rank.take_request(false));
    std::printf("taken by client %u\n", rank.welcome().client_slot);
    std::fflush(stdout);
    for (;;) {
      for (std::uint32_t i = 0; i < slot.pages.load(); ++i)
        std::memset(rank.pool() + slot.page[i].pool_offset.load(), 0xee, spec.shard_bytes());
      ::usleep(50);
    }
    return 0;
  });
}

inline std::string slot_of(Child& child) {
  const auto line = child.read_line();
  REQUIRE(line.has_value());
  REQUIRE(line->rfind("taken by client ", 0) == 0);
  return line->substr(16);
}

}  // namespace hicache::test
