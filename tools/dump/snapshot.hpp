// A private copy of a region and the verdict over it. Everything else in this tool works on the copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "shm/region.hpp"
#include "tools/dump/region_source.hpp"

namespace hicache::inspect {

// A region larger than this is refused as damaged: the largest table a daemon can make is far below.
constexpr std::uint64_t kMaxSnapshotBytes = 4 * kGiB;

enum class Condition {
  alive,          // the daemon runs
  draining,       // the daemon runs and is stopping
  closed,         // the daemon stopped in order
  dead,           // the daemon is gone without closing the region
  initialising,   // being made, or its daemon died while it made it
  other_version,  // made by another version of this project
  not_a_region,
  damaged,
};
std::string_view to_string(Condition condition);

struct Verdict {
  Condition condition = Condition::not_a_region;
  std::string why;
};

// Reads one relaxed value out of the copy.
template <class Atomic>
auto get(const Atomic& a) {
  return a.load(std::memory_order_relaxed);
}

// Move-only. The tables hold only entries that were read: those of a damaged region may be cut or empty.
class Snapshot {
 public:
  // What to read: everything, or only the small tables (configuration, namespaces, clients, groups,
  // counters), for a reader that comes back every second. The tables that are left out are empty.
  enum class Extent { everything, small_tables };

  // Never fails: what could not be read is in the verdict. Throws std::bad_alloc when memory runs out.
  static Snapshot take(RegionSource& source, Extent extent = Extent::everything);

  [[nodiscard]] const Verdict& verdict() const { return verdict_; }
  // Sentences of the header check; empty when the region is usable.
  [[nodiscard]] const std::vector<std::string>& header_findings() const { return header_findings_; }
  // Header and sections passed every check, and all of it could be read.
  [[nodiscard]] bool usable() const { return usable_; }
  // The header is of this version, so that its fields mean what they say (if nothing has damaged them).
  [[nodiscard]] bool readable() const { return readable_; }
  // The tables may have changed while they were copied, and may change again.
  [[nodiscard]] bool may_change() const { return may_change_; }
  // The coordinator changed nothing while the tables were copied: they belong to one moment.
  [[nodiscard]] bool quiet() const { return quiet_; }
  // The recorded daemon process runs.
  [[nodiscard]] bool daemon_alive() const { return daemon_alive_; }
  // `header` is never null.
  [[nodiscard]] const ConstTables& tables() const { return tables_; }
  [[nodiscard]] const RegionPlan& plan() const { return plan_; }
  [[nodiscard]] std::uint64_t object_bytes() const { return object_bytes_; }
  // Entries of the page table, also where it was left out.
  [[nodiscard]] std::uint64_t page_capacity() const { return page_capacity_; }
  [[nodiscard]] std::uint64_t commit_sequence() const { return get(tables_.header->commit_sequence); }

 private:
  struct AlignedFree {
    void operator()(std::uint8_t* p) const { ::operator delete (p, std::align_val_t{4096}); }
  };

  Snapshot() = default;
  void read_tables(RegionSource& source);
  void drop_torn_records(RegionSource& source);
  void judge(RegionVerdict header_verdict);

  std::unique_ptr<std::uint8_t, AlignedFree> bytes_;
  RegionPlan plan_;
  ConstTables tables_;
  Verdict verdict_;
  std::vector<std::string> header_findings_;
  std::uint64_t object_bytes_ = 0;
  std::uint64_t page_capacity_ = 0;
  bool usable_ = false;
  bool readable_ = false;
  bool quiet_ = false;
  bool may_change_ = false;
  bool daemon_alive_ = false;
};

}  // namespace hicache::inspect
