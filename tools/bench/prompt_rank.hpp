// One rank that works off made-up prompts one after the other and compares every byte it loads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "libhicache/include/hicache/client.hpp"
#include "shm/status.hpp"
#include "tools/bench/bench_model.hpp"

namespace hicache::bench {

// Page keys of prompt n, the same in every process.
std::vector<PrefixHash> prompt_keys(std::uint32_t n, std::uint32_t pages);

struct PromptRankOptions {
  std::string socket_path;
  std::string engine;
  std::uint32_t tp_rank = 0;
  std::uint32_t deadline_ms = 30'000;  // of every operation
  std::uint32_t attach_ms = 10'000;
};

class PromptRank {
 public:
  // `memory` must outlive the rank and hold a page for each page of a prompt.
  static Result<std::unique_ptr<PromptRank>> attach(const PromptRankOptions& options,
                                                    const NamespaceSpec& spec, const DeviceMemory& memory);

  struct Reading {
    std::uint32_t hits = 0;
    std::uint32_t written = 0;
    std::uint64_t wrong_words = 0;
    std::uint32_t operations = 0;
  };
  // Reserve, load and compare at most `load_at_most` hits, write what was missing if `write`, release.
  // Sequences of a session count from 1. An error ends the request where it came.
  Result<Reading> request(const std::vector<PrefixHash>& keys, std::uint32_t load_at_most, bool write);

  // The longest that any wait of this rank took.
  [[nodiscard]] std::uint64_t longest_wait_ns() const { return longest_wait_ns_; }

 private:
  PromptRank(std::unique_ptr<Session> session, const PromptRankOptions& options, const NamespaceSpec& spec,
             const DeviceMemory& memory)
      : session_(std::move(session)),
        digest_(spec.digest()),
        shard_(spec.shards() > 1 ? options.tp_rank : 0),
        deadline_ms_(options.deadline_ms),
        memory_(memory) {}
  Result<OperationResult> run(const Result<Ticket>& ticket);
  [[nodiscard]] std::uint64_t base_of(const DeviceTensor& tensor, const PrefixHash& key) const;

  std::unique_ptr<Session> session_;
  PrefixHash digest_;
  std::uint32_t shard_;
  std::uint32_t deadline_ms_;
  const DeviceMemory& memory_;
  std::uint64_t sequence_ = 0;
  std::uint64_t longest_wait_ns_ = 0;
};

}  // namespace hicache::bench
