#include "tools/dump/snapshot.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "shm/process.hpp"

namespace hicache::inspect {
namespace {

// What of a damaged header's section table can still be read: each section on its own, cut to the object's
// size.
RegionPlan salvage_plan(const RegionHeader& header, std::uint64_t available) {
  RegionPlan plan;
  for (std::uint32_t i = 0; i < kSectionCount; ++i) {
    const auto kind = static_cast<SectionKind>(i + 1);
    const std::uint32_t entry_bytes = section_entry_bytes(kind);
    const std::uint64_t offset = get(header.sections[i].offset);
    plan.sections[i] = SectionPlan{kind, entry_bytes, kHeaderBytes, 0};
    if (get(header.sections[i].kind) != i + 1 || offset < kHeaderBytes || offset % 4096 != 0) continue;
    if (offset >= available) continue;
    const std::uint64_t fits = std::min<std::uint64_t>((available - offset) / entry_bytes, kNone32 - 1);
    plan.sections[i].offset = offset;
    plan.sections[i].entries = std::min(get(header.sections[i].entries), fits);
  }
  // A counter table of another size would have its values under the wrong names.
  SectionPlan& counters = plan.sections[static_cast<std::uint32_t>(SectionKind::counters) - 1];
  if (counters.entries != kCounterCount) counters.entries = 0;
  return plan;
}

std::uint64_t end_of(const RegionPlan& plan) {
  std::uint64_t end = kHeaderBytes;
  for (const SectionPlan& s : plan.sections) end = std::max(end, s.offset + s.bytes());
  return end;
}

void leave_out_large_tables(RegionPlan& plan) {
  for (SectionPlan& section : plan.sections) {
    switch (section.kind) {
      case SectionKind::config_text:
      case SectionKind::namespaces:
      case SectionKind::clients:
      case SectionKind::groups:
      case SectionKind::counters:
        break;
      default:
        section.offset = kHeaderBytes;
        section.entries = 0;
    }
  }
}

bool same_daemon_lives(const RegionHeader& header) {
  const std::string recorded = load_text(header.boot_id);
  const std::string now = boot_id();
  if (!recorded.empty() && !now.empty() && recorded != now) return false;
  return ProcessIdentity{get(header.daemon_pid), get(header.daemon_start_ticks)}.alive();
}

}  // namespace

std::string_view to_string(Condition condition) {
  switch (condition) {
    case Condition::alive:
      return "alive";
    case Condition::draining:
      return "draining";
    case Condition::closed:
      return "closed";
    case Condition::dead:
      return "dead";
    case Condition::initialising:
      return "initialising";
    case Condition::other_version:
      return "other version";
    case Condition::not_a_region:
      return "not a region";
    case Condition::damaged:
      return "damaged";
  }
  return "unknown";
}

Snapshot Snapshot::take(RegionSource& source, Extent extent) {
  Snapshot s;
  s.object_bytes_ = source.size();
  alignas(RegionHeader) std::array<std::uint8_t, kHeaderBytes> header_bytes{};
  const std::size_t header_read = source.read(0, header_bytes);
  RegionCheck check = check_header(std::span(header_bytes).first(header_read), s.object_bytes_);
  const auto& header = *reinterpret_cast<const RegionHeader*>(header_bytes.data());
  s.header_findings_ = check.findings;
  s.readable_ = header_read == kHeaderBytes && get(header.layout_major) == kLayoutMajor &&
                get(header.layout_fingerprint) == layout_fingerprint();
  s.usable_ = check.verdict == RegionVerdict::usable && header_read == kHeaderBytes;
  s.plan_ = s.usable_ ? check.plan : salvage_plan(header, s.readable_ ? s.object_bytes_ : 0);

  if (end_of(s.plan_) > kMaxSnapshotBytes) {
    s.header_findings_.push_back("damaged header: tables of " + std::to_string(end_of(s.plan_)) +
                                 " bytes, expected at most " + std::to_string(kMaxSnapshotBytes));
    s.usable_ = false;
    s.plan_ = salvage_plan(header, 0);
  }
  s.page_capacity_ = s.plan_.section(SectionKind::pages).entries;
  if (extent == Extent::small_tables) leave_out_large_tables(s.plan_);
  const std::uint64_t bytes = end_of(s.plan_);
  s.bytes_.reset(static_cast<std::uint8_t*>(::operator new (bytes, std::align_val_t{4096})));
  std::memcpy(s.bytes_.get(), header_bytes.data(), kHeaderBytes);
  s.read_tables(source);
  s.tables_ = make_tables(static_cast<const void*>(s.bytes_.get()), s.plan_);
  s.drop_torn_records(source);

  alignas(RegionHeader) std::array<std::uint8_t, kHeaderBytes> after{};
  const bool again = source.read(0, after) == kHeaderBytes;
  const std::uint64_t commit = s.commit_sequence();
  s.quiet_ = s.usable_ && again && commit % 2 == 0 &&
             get(reinterpret_cast<const RegionHeader*>(after.data())->commit_sequence) == commit;
  s.daemon_alive_ = s.readable_ && same_daemon_lives(header);
  s.may_change_ = source.may_change() && s.daemon_alive_;
  s.judge(check.verdict);
  return s;
}

void Snapshot::read_tables(RegionSource& source) {
  for (SectionPlan& section : plan_.sections) {
    const std::uint64_t wanted = section.bytes();
    if (wanted == 0) continue;
    const std::size_t got = source.read(section.offset, std::span(bytes_.get() + section.offset, wanted));
    if (got == wanted) continue;
    section.entries = got / section.entry_bytes;
    usable_ = false;
    header_findings_.push_back("the object ends inside section " + std::string(to_string(section.kind)) +
                               ": it was made shorter while it was read");
  }
}

// A record that differs between two reads was being written during one of them.
void Snapshot::drop_torn_records(RegionSource& source) {
  const SectionPlan& section = plan_.section(SectionKind::flight_recorder);
  std::vector<std::uint8_t> again(section.bytes());
  const std::size_t got = source.read(section.offset, again);
  auto* records = reinterpret_cast<FlightRecord*>(bytes_.get() + section.offset);
  for (std::uint64_t i = 0; i < section.entries; ++i) {
    const std::uint64_t at = i * sizeof(FlightRecord);
    const bool same =
        at + sizeof(FlightRecord) <= got &&
        std::memcmp(again.data() + at, static_cast<const void*>(records + i), sizeof(FlightRecord)) == 0;
    if (!same) records[i].sequence.store(0, std::memory_order_relaxed);
  }
}

void Snapshot::judge(RegionVerdict header_verdict) {
  const RegionHeader& h = *tables_.header;
  const std::string first = header_findings_.empty() ? "" : header_findings_.front();
  const std::string daemon = "daemon pid " + std::to_string(get(h.daemon_pid));
  if (header_verdict == RegionVerdict::other_version) {
    verdict_ = {Condition::other_version, first};
  } else if (header_verdict == RegionVerdict::not_a_region) {
    verdict_ = {readable_ ? Condition::damaged : Condition::not_a_region, first};
  } else if (header_verdict == RegionVerdict::initialising) {
    verdict_ = {Condition::initialising, first};
  } else if (!usable_) {
    verdict_ = {Condition::damaged, first};
  } else if (get(h.state) == static_cast<std::uint32_t>(RegionState::closed)) {
    verdict_ = {Condition::closed, daemon + " stopped in order"};
  } else if (!daemon_alive_) {
    verdict_ = {Condition::dead,
                daemon + " is gone and did not close the region" +
                    (commit_sequence() % 2 != 0 ? "; it died in the middle of a change" : "")};
  } else if (get(h.state) == static_cast<std::uint32_t>(RegionState::draining)) {
    verdict_ = {Condition::draining, daemon + " is stopping"};
  } else {
    verdict_ = {Condition::alive, daemon + " serves it"};
  }
}

}  // namespace hicache::inspect
