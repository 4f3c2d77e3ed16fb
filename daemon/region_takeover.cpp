#include "daemon/region_takeover.hpp"

#include <spdlog/fmt/fmt.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "daemon/config_keys.hpp"
#include "shm/process.hpp"
#include "shm/shared_memory.hpp"

namespace hicache::daemon {
namespace {

template <class Atomic>
auto get(const Atomic& a) {
  return a.load(std::memory_order_relaxed);
}

// The header in private memory: what is checked is what is used.
class HeaderCopy {
 public:
  explicit HeaderCopy(int fd) {
    const ssize_t n = ::pread(fd, bytes_, sizeof bytes_, 0);
    complete_ = n == static_cast<ssize_t>(sizeof bytes_);
  }
  [[nodiscard]] bool complete() const { return complete_; }
  [[nodiscard]] const RegionHeader& header() const { return *reinterpret_cast<const RegionHeader*>(bytes_); }

 private:
  alignas(RegionHeader) std::uint8_t bytes_[sizeof(RegionHeader)] = {};
  bool complete_ = false;
};

void check_identity(const RegionHeader& h, std::vector<std::string>& misfits) {
  if (get(h.magic) != kRegionMagic) {
    misfits.push_back("it is no finished hicache region (wrong magic)");
    return;
  }
  if (get(h.layout_major) != kLayoutMajor || get(h.layout_fingerprint) != layout_fingerprint()) {
    misfits.push_back(fmt::format(
        "it has layout {}.{} with fingerprint {:x}, this build reads and writes layout {}.{} with "
        "fingerprint {:x}: its pages, namespaces and counters can't be read by this version",
        get(h.layout_major), get(h.layout_minor), get(h.layout_fingerprint), kLayoutMajor, kLayoutMinor,
        layout_fingerprint()));
    return;
  }
  const auto state = static_cast<RegionState>(get(h.state));
  if (state != RegionState::ready && state != RegionState::draining && state != RegionState::closed &&
      state != RegionState::recovering) {
    misfits.push_back(fmt::format("it was never finished (state {})", get(h.state)));
  } else if (state != RegionState::recovering && get(h.header_crc) != header_crc(h)) {
    // A takeover that died half-way leaves a mixed header behind; everything that matters in it is compared
    // below.
    misfits.push_back("its header is damaged (checksum differs)");
  }
}

void check_sizes(const RegionHeader& h, const Config& config, const RegionPlan& plan,
                 std::uint64_t pool_bytes, std::vector<std::string>& misfits) {
  const auto differs = [&](const std::string& what, std::uint64_t found, std::uint64_t expected) {
    if (found != expected) {
      misfits.push_back(fmt::format("{}: found {}, this configuration needs {}", what, found, expected));
    }
  };
  differs("pool bytes", get(h.pool_bytes), pool_bytes);
  differs("segment bytes", get(h.segment_bytes), config.pool.segment_bytes);
  differs("sections", get(h.section_count), kSectionCount);
  for (std::uint32_t i = 0; i < kSectionCount; ++i) {
    const SectionPlan& wanted = plan.sections[i];
    const Section& found = h.sections[i];
    const std::string name(to_string(wanted.kind));
    const std::size_t before = misfits.size();
    differs("entries of " + name, get(found.entries), wanted.entries);
    if (misfits.size() == before && (get(found.kind) != static_cast<std::uint32_t>(wanted.kind) ||
                                     get(found.entry_bytes) != wanted.entry_bytes)) {
      misfits.push_back("the section table is damaged at " + name);
    }
  }
  // Places follow from the counts: name them only when nothing else explains the difference.
  for (std::uint32_t i = 0; misfits.empty() && i < kSectionCount; ++i) {
    differs("offset of " + std::string(to_string(plan.sections[i].kind)), get(h.sections[i].offset),
            plan.sections[i].offset);
  }
  if (misfits.empty()) differs("region bytes", get(h.region_bytes), plan.total_bytes);
}

void check_object(const std::string& name, int fd, std::uint64_t bytes, std::vector<std::string>& misfits) {
  struct stat st {};
  if (::fstat(fd, &st) != 0) {
    misfits.push_back(name + " can't be looked at");
  } else if (st.st_uid != ::geteuid() || (st.st_mode & 0077) != 0) {
    misfits.push_back(
        fmt::format("{} belongs to user {} with mode {:o}, expected user {} and no access for others", name,
                    st.st_uid, st.st_mode & 0777u, ::geteuid()));
  } else if (static_cast<std::uint64_t>(st.st_size) != bytes) {
    misfits.push_back(fmt::format("{} has {}, expected {}", name,
                                  format_bytes(static_cast<std::uint64_t>(st.st_size)), format_bytes(bytes)));
  } else if (static_cast<std::uint64_t>(st.st_blocks) * 512 < bytes) {
    misfits.push_back(name + " has holes: somebody gave part of its memory back");
  }
}

}  // namespace

Result<Leftover> examine_leftover(const Config& config, const RegionPlan& plan, std::uint64_t pool_bytes,
                                  int patience_ms) {
  Leftover leftover;
  const std::string control_name = control_object_name(config.name);
  const std::string pool_name = pool_object_name(config.name, 0);
  auto control = open_named(control_name, Mapping::Access::read_write);
  if (!control) {
    if (control.status() != Status::not_found) leftover.misfits.push_back(control.error().message);
    return leftover;
  }
  const HeaderCopy copy(control->get());
  if (!copy.complete()) {
    leftover.misfits.push_back(control_name + " is shorter than a region's header");
    return leftover;
  }
  const RegionHeader& h = copy.header();
  check_identity(h, leftover.misfits);
  // Also where nothing will be kept: the owner's copies may still land in memory that is about to be given
  // back.
  const ProcessIdentity owner{get(h.daemon_pid), get(h.daemon_start_ticks)};
  const bool known = get(h.magic) == kRegionMagic && get(h.layout_fingerprint) == layout_fingerprint();
  if (known && owner.pid != static_cast<std::uint32_t>(::getpid()) && load_text(h.boot_id) == boot_id() &&
      !await_process_end(owner, patience_ms)) {
    return Error{
        Status::busy,
        fmt::format("the daemon '{}' (pid {}) is still alive and owns {}: stop it first, or choose another "
                    "name",
                    config.name, owner.pid, control_name),
        0};
  }
  if (leftover.misfits.empty()) check_sizes(h, config, plan, pool_bytes, leftover.misfits);
  if (!leftover.misfits.empty()) return leftover;
  check_object(control_name, control->get(), plan.total_bytes, leftover.misfits);
  auto pool = open_named(pool_name, Mapping::Access::read_write);
  if (!pool) {
    leftover.misfits.push_back(pool.error().message);
    return leftover;
  }
  check_object(pool_name, pool->get(), pool_bytes, leftover.misfits);
  if (leftover.misfits.empty()) leftover.region = TakeoverRegion{std::move(*control), std::move(*pool)};
  return leftover;
}

}  // namespace hicache::daemon
