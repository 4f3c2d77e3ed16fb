// What the crash tests share: checks of a region from outside, and reading prompts back with their content.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/test_rank.hpp"

namespace hicache::test {

// The findings of hicache-dump --check; "" when the region is sound.
inline std::string dump_findings(const std::string& name) {
  const auto run = run_program({program("hicache-dump"), name, "--check"});
  return run.status.exited_with(0) ? "" : run.out + run.err;
}

// Mappings of hicache's memory in a process: regions, channels, device buffers.
inline std::size_t mapping_count(pid_t pid) {
  std::istringstream maps(read_text("/proc/" + std::to_string(pid) + "/maps"));
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("/hicache") != std::string::npos || line.find("memfd:") != std::string::npos) ++count;
  }
  return count;
}

struct ReadBack {
  std::uint32_t hits = 0;
  std::uint32_t wrong = 0;  // pages that were served with other bytes than theirs
  Status status = Status::ok;
};

// Reserves a prompt, loads its hits over spoilt device pages, compares every byte, releases.
inline ReadBack read_back(TestRank& rank, std::uint64_t sequence, const std::vector<PrefixHash>& hashes) {
  ReadBack out;
  const auto reserved = rank.run(rank.session().reserve(sequence, hashes));
  out.status = reserved.status;
  if (reserved.status != Status::ok) return out;
  if (reserved.hits > 0) {
    const auto pages = TestRank::pages(0, reserved.hits);
    for (const DevicePage page : pages) rank.spoil(page);
    const auto loaded = rank.run(rank.session().load(reserved.lease, 0, pages));
    out.status = loaded.status;
    if (loaded.status == Status::ok) {
      out.hits = reserved.hits;
      for (std::uint32_t i = 0; i < reserved.hits; ++i) out.wrong += rank.holds(pages[i], hashes[i]) ? 0 : 1;
    }
  }
  rank.run(rank.session().release(reserved.lease));
  return out;
}

inline std::vector<std::vector<PrefixHash>> write_prompts(TestRank& rank, std::uint32_t prompts,
                                                          std::uint32_t pages,
                                                          std::uint64_t first_sequence = 1) {
  std::vector<std::vector<PrefixHash>> all;
  for (std::uint32_t i = 0; i < prompts; ++i) {
    all.push_back(prompt(i, pages));
    write_prompt(rank, first_sequence + i, all.back());
  }
  return all;
}

}  // namespace hicache::test
