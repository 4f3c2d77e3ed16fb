// A small control region in memory, built the way the daemon builds one, for tests that read regions.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <string_view>
#include <vector>

#include "shm/page_word.hpp"
#include "shm/region.hpp"

namespace hicache::test {

class RegionBuilder {
 public:
  // Empty tables: all pages and segments free, header complete, state ready, daemon = `daemon_pid` of no
  // process.
  explicit RegionBuilder(std::string_view config_text = R"({"limits":{"submission_entries":256}})");

  [[nodiscard]] Tables& tables() { return tables_; }
  [[nodiscard]] std::span<const std::uint8_t> bytes() const { return {bytes_.get(), plan_.total_bytes}; }
  [[nodiscard]] std::span<std::uint8_t> bytes() { return {bytes_.get(), plan_.total_bytes}; }
  [[nodiscard]] const RegionPlan& plan() const { return plan_; }

  // Each returns the index of the entry it filled.
  std::uint32_t add_namespace(std::uint32_t shards, std::uint64_t shard_bytes, std::string_view label);
  std::uint32_t add_group(std::uint32_t ns, std::uint32_t tp_size, std::string_view engine);
  std::uint32_t add_rank(std::uint32_t group, std::uint32_t tp_rank);
  std::uint32_t add_scheduler(std::uint32_t group);
  // A page with a slot and a key of its own, in the index when its state belongs there.
  std::uint32_t add_page(std::uint32_t ns, std::uint32_t parent, PageState state,
                         std::uint32_t filler = kNone32);
  // A lease of all attached ranks of the group that pins these pages.
  std::uint32_t add_lease(std::uint32_t group, const std::vector<std::uint32_t>& pages);
  void add_record(std::uint64_t sequence);

  // Sets gauges and namespace totals to what the tables hold.
  void count();
  // Makes the header's check sum fit its content again.
  void seal_header();
  // Names this very process as the daemon, so that the region counts as alive.
  void adopt();

 private:
  struct AlignedFree {
    void operator()(std::uint8_t* p) const { ::operator delete (p, std::align_val_t{4096}); }
  };
  std::uint64_t take_slot(std::uint32_t size_class, std::uint64_t slot_bytes);
  std::uint32_t add_client(std::uint32_t group, std::uint32_t role, std::uint32_t tp_rank);

  RegionPlan plan_;
  std::unique_ptr<std::uint8_t, AlignedFree> bytes_;
  Tables tables_;
  std::vector<std::uint64_t> slot_sizes_;  // by size class
  std::uint32_t next_key_ = 1;
};

// A region with something of everything; the comments name the entries that tests rely on.
//   namespaces  0: 4 shards, 1: 1 shard, 2: slots larger than a segment
//   groups      0: ranks 0 to 3 of namespace 0 (clients 0 to 3), 1: ranks 0, 1 and a scheduler of namespace 1
//   pages       0 <- 1 <- 2 <- 4 (filling for lease 0) and 0 <- 3 in namespace 0, 5 <- 6 and 7 (aborting) in
//               namespace 1, 8 in namespace 2; all others ready
//   leases      0: group 0, pins pages 0, 1, 2, 4; 1: group 1, pins 5
RegionBuilder standard_region();

}  // namespace hicache::test
