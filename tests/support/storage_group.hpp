// A whole TP group in one process, on a daemon with storage.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tests/support/storage_daemon.hpp"

namespace hicache::test {

constexpr auto kComplete = PrefetchPolicy::wait_complete;

inline NamespaceSpec spec_with(std::uint32_t page_tokens, std::uint32_t tp_size = 1,
                               Attention attention = Attention::mha) {
  NamespaceSpec spec = small_spec(attention, tp_size);
  spec.page_tokens = page_tokens;
  return spec;
}

inline OperationResult reserve(TestRank& rank, std::uint64_t sequence,
                               const std::vector<PrefixHash>& hashes) {
  auto result = rank.run(rank.session().reserve(sequence, hashes));
  REQUIRE(result.status == Status::ok);
  return result;
}

// A whole group in one process.
struct Group {
  Group(const TestDaemon& daemon, const NamespaceSpec& spec, const std::string& engine = "engine") {
    for (std::uint32_t i = 0; i < spec.tp_size; ++i) {
      ranks.push_back(std::make_unique<TestRank>(daemon, engine, i, spec));
    }
  }
  TestRank& operator[](std::size_t i) { return *ranks[i]; }
  LeaseId reserve_all(std::uint64_t sequence, const std::vector<PrefixHash>& hashes) {
    LeaseId lease;
    for (auto& rank : ranks) lease = reserve(*rank, sequence, hashes).lease;
    return lease;
  }
  std::uint32_t write_all(std::uint64_t sequence, const std::vector<PrefixHash>& hashes) {
    const LeaseId lease = reserve_all(sequence, hashes);
    const auto count = static_cast<std::uint32_t>(hashes.size());
    std::vector<Ticket> tickets;
    for (auto& rank : ranks) {
      for (std::uint32_t i = 0; i < count; ++i) rank->fill(DevicePage{i}, hashes[i]);
      tickets.push_back(TestRank::take(rank->session().write(lease, 0, TestRank::pages(0, count))));
    }
    std::uint32_t written = 0;
    for (std::size_t i = 0; i < ranks.size(); ++i) written = ranks[i]->run(tickets[i]).written;
    release_all(lease);
    return written;
  }
  void release_all(LeaseId lease) {
    for (auto& rank : ranks) rank->run(rank->session().release(lease));
  }
  std::vector<std::unique_ptr<TestRank>> ranks;
};

}  // namespace hicache::test
