#include "daemon/region_owner.hpp"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "daemon/config_keys.hpp"
#include "daemon/huge_pages.hpp"
#include "daemon/needs.hpp"
#include "daemon/numa/pool_nodes.hpp"
#include "shm/clock.hpp"
#include "shm/crash_points.hpp"
#include "shm/machine/checks.hpp"
#include "shm/page_word.hpp"
#include "shm/process.hpp"

namespace hicache::daemon {
namespace {

constexpr const char* kShmDirectory = "/dev/shm";
constexpr std::uint32_t kMinPinnedPages = 65536;  // room for one operation of the largest size

std::uint64_t random_u64() {
  std::uint64_t v = 0;
  if (::getrandom(&v, sizeof v, 0) != sizeof v)
    v = unix_ns() ^ (static_cast<std::uint64_t>(::getpid()) << 32);
  return v;
}

// What the start checks looked at, again at the moment of the reservation: the names of an earlier region are
// gone now, and only now it is certain that this is the only daemon of the name. A daemon that takes a region
// over reserves nothing.
Outcome check_room(const Config& config) {
  const machine::Needs needs = needs_of(config);
  machine::Machine machine;
  machine::measure_room(needs, "", machine);
  for (const machine::Check& check :
       {machine::check_shm(needs, machine), machine::check_memory(needs, machine)}) {
    if (check.level == machine::Level::refused) return Error{Status::no_space, machine::sentence(check), 0};
  }
  return success();
}

// Before its memory is reserved. A kernel or container that forbids it costs speed, not the start.
Outcome place_on_nodes(int fd, std::uint64_t bytes, NumaPlacement wanted) {
  if (wanted == NumaPlacement::off || bytes <= kNumaStripeBytes) return success();
  const std::vector<NumaNode> nodes = memory_nodes();
  if (nodes.size() < 2) return success();
  if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0)
    return Error{Status::system_error, std::string("ftruncate: ") + std::strerror(errno), errno};
  if (auto spread = spread_over_nodes(fd, bytes, nodes); !spread) {
    spdlog::warn(
        "the pool is not spread over this machine's {} NUMA nodes: {} (containers: allow mbind, for instance "
        "with "
        "--cap-add SYS_NICE; \"pool.numa\": \"off\" asks for nothing)",
        nodes.size(), spread.error().message);
  }
  return success();
}

constexpr int kOldProcessPatienceMs = 10'000;  // freeing its memory takes a killed daemon 75 ms per GiB

}  // namespace

RegionShape shape_for(const Config& config) {
  RegionShape shape;
  // Whole pages, so that a key that may change from start to start does not move the other sections.
  shape.config_text_bytes = align_up(config_to_json(config).size(), 4096);
  shape.namespaces = config.limits.namespaces;
  shape.clients = config.limits.clients;
  shape.groups = config.limits.clients;  // a group has at least one member
  shape.segments = static_cast<std::uint32_t>(config.pool.bytes / config.pool.segment_bytes);
  shape.pages = config.page_table_entries();
  shape.index_buckets = std::bit_ceil(shape.pages * 2u);
  shape.leases = config.limits.leases;
  // Every page pinned twice in full chunks, plus one partly filled chunk a lease.
  const std::uint64_t wanted = std::uint64_t{std::max(shape.pages, kMinPinnedPages)} * 2;
  // A request may name one page any number of times, so all pins there are must fit one page word.
  const std::uint64_t in_part_full_chunks = (std::uint64_t{config.limits.leases} + 1) * PinChunk::kPages;
  const std::uint64_t pins = std::min(wanted, PageWord::kMaxPins - 1 - in_part_full_chunks);
  shape.pin_chunks = static_cast<std::uint32_t>(pins / PinChunk::kPages + 1 + config.limits.leases);
  shape.flight_records = config.region.flight_records;
  if (config.integrity.checksums != ChecksumPolicy::off)
    shape.checksums = usable_pool_bytes(config) / kPoolAlignment;
  return shape;
}

std::uint64_t usable_pool_bytes(const Config& config) {
  return config.pool.bytes / config.pool.segment_bytes * config.pool.segment_bytes;
}

Result<NameLock> NameLock::acquire(const std::string& name) {
  std::string path = std::string(kShmDirectory) + "/hicache." + name + ".lock";
  // A holder that goes removes the file: a lock on a removed file excludes nobody, so look again until the
  // locked file is the one that has the name.
  for (;;) {
    UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!fd.valid()) {
      return Error{Status::system_error, "cannot open the lock file " + path + ": " + std::strerror(errno),
                   errno};
    }
    if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EINTR) continue;
      if (errno != EWOULDBLOCK) {
        return Error{Status::system_error, "cannot lock " + path + ": " + std::strerror(errno), errno};
      }
      char holder[32] = {};
      const ssize_t n = ::pread(fd.get(), holder, sizeof holder - 1, 0);
      const std::string pid = n > 0 ? std::string(holder, static_cast<std::size_t>(n)) : "unknown";
      return Error{Status::busy,
                   "a daemon '" + name + "' (pid " + pid +
                       ") is already running: stop it first, or give this one another name",
                   0};
    }
    NameLock lock(std::move(fd), path);
    if (!lock.named()) continue;
    const std::string pid = std::to_string(::getpid());
    if (::ftruncate(lock.fd_.get(), 0) != 0 ||
        ::pwrite(lock.fd_.get(), pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
      return Error{Status::system_error, "cannot write the lock file " + path + ": " + std::strerror(errno),
                   errno};
    }
    return lock;
  }
}

NameLock::~NameLock() {
  if (named()) ::unlink(path_.c_str());
}

bool NameLock::named() const {
  struct stat held {};
  struct stat name {};
  return fd_.valid() && ::fstat(fd_.get(), &held) == 0 && ::stat(path_.c_str(), &name) == 0 &&
         held.st_ino == name.st_ino && held.st_dev == name.st_dev;
}

RegionOwner::RegionOwner(NameLock lock, const Config& config)
    : lock_(std::move(lock)), name_(config.name), keep_on_exit_(config.region.keep_on_exit) {}

RegionOwner::RegionOwner(RegionOwner&& other) noexcept
    : lock_(std::move(other.lock_)),
      name_(std::move(other.name_)),
      keep_on_exit_(other.keep_on_exit_),
      created_(std::exchange(other.created_, false)),
      taken_over_(other.taken_over_),
      settled_(other.settled_),
      instance_epoch_(other.instance_epoch_),
      control_read_only_(std::move(other.control_read_only_)),
      pool_fd_(std::move(other.pool_fd_)),
      control_map_(std::move(other.control_map_)),
      pool_map_(std::move(other.pool_map_)),
      tables_(other.tables_) {}

RegionOwner::~RegionOwner() {
  if (!created_) return;
  if (tables_.header != nullptr) {
    tables_.header->state.store(static_cast<std::uint32_t>(RegionState::closed), std::memory_order_release);
  }
  if (keep_on_exit_ || (taken_over_ && !settled_)) return;
  if (!lock_.named()) return;  // whatever lies under the names is another daemon's
  remove_named(control_object_name(name_));
  remove_named(pool_object_name(name_, 0));
}

Result<RegionOwner> RegionOwner::create(const Config& config, const std::string& socket_path, Start start) {
  auto lock = NameLock::acquire(config.name);
  if (!lock) return lock.error();
  const RegionPlan plan = plan_region(shape_for(config));
  auto leftover = examine_leftover(config, plan, usable_pool_bytes(config), kOldProcessPatienceMs);
  if (!leftover) return leftover.error();
  RegionOwner owner(std::move(*lock), config);
  if (leftover->region && start == Start::take_over) {
    if (auto taken = owner.take_over(config, plan, socket_path, *leftover->region); !taken)
      return taken.error();
    return owner;
  }
  if (leftover->region) {
    spdlog::warn("starting fresh, as asked: the pages of the region that was here are dropped");
  } else if (!leftover->misfits.empty()) {
    for (const std::string& misfit : leftover->misfits) {
      spdlog::warn("the region that daemon '{}' left behind can't be taken over: {}", config.name, misfit);
    }
    spdlog::warn("starting fresh: the pages of that region are dropped");
  }
  remove_named(control_object_name(config.name));
  remove_named(pool_object_name(config.name, 0));
  if (auto built = owner.build(config, plan, socket_path); !built) return built.error();
  return owner;
}

Outcome RegionOwner::build(const Config& config, const RegionPlan& plan, const std::string& socket_path) {
  const std::uint64_t pool_bytes = usable_pool_bytes(config);
  if (auto room = check_room(config); !room) return room;

  // From here on the destructor removes what exists.
  created_ = true;
  auto control = create_named(control_object_name(name_), plan.total_bytes);
  if (!control) return control.error();
  HICACHE_CRASH_POINT(region_control_made);
  auto pool = create_named(pool_object_name(name_, 0), pool_bytes, [&](int fd) -> Outcome {
    if (auto placed = place_on_nodes(fd, pool_bytes, config.pool.numa); !placed) return placed;
    return fill_with_huge_pages(fd, pool_bytes, config.pool.huge_pages);
  });
  if (!pool) return pool.error();
  if (auto mapped = map(control->get(), pool->get(), plan, pool_bytes); !mapped) return mapped;
  tables_.header->segment_bytes.store(config.pool.segment_bytes, std::memory_order_relaxed);
  store_config(config);
  fill_header(plan, socket_path, RegionState::initialising);
  HICACHE_CRASH_POINT(region_header_written);
  return success();
}

Outcome RegionOwner::take_over(const Config& config, const RegionPlan& plan, const std::string& socket_path,
                               const TakeoverRegion& region) {
  if (auto mapped = map(region.control.get(), region.pool.get(), plan, usable_pool_bytes(config)); !mapped)
    return mapped;
  taken_over_ = created_ = true;
  RegionHeader& h = *tables_.header;
  // SYNC takeover: the state says "recovering", then the epoch changes, then the tables do. A reader that
  // took the tables for whole finds another epoch when it looks again. A death from here on leaves a region
  // that the next daemon takes over in the same way: nothing is kept that the page table alone does not
  // prove.
  h.state.store(static_cast<std::uint32_t>(RegionState::recovering), std::memory_order_seq_cst);
  HICACHE_CRASH_POINT(takeover_recovering);
  fill_header(plan, socket_path, RegionState::recovering);
  HICACHE_CRASH_POINT(takeover_header_written);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  store_config(config);
  // The owner may have died in the middle of a commit.
  const std::uint64_t commits = h.commit_sequence.load(std::memory_order_relaxed);
  h.commit_sequence.store(commits + commits % 2, std::memory_order_relaxed);
  return success();
}

Outcome RegionOwner::map(int control, int pool, const RegionPlan& plan, std::uint64_t pool_bytes) {
  auto read_only = reopen_read_only(control);
  if (!read_only) return read_only.error();
  auto control_map = Mapping::map(control, plan.total_bytes, Mapping::Access::read_write, true);
  if (!control_map) return control_map.error();
  auto pool_map = Mapping::map(pool, pool_bytes, Mapping::Access::read_write, true);
  if (!pool_map) return pool_map.error();
  UniqueFd pool_fd(::fcntl(pool, F_DUPFD_CLOEXEC, 0));
  if (!pool_fd.valid()) return Error{Status::system_error, "cannot keep the pool's descriptor", errno};
  control_read_only_ = std::move(*read_only);
  pool_fd_ = std::move(pool_fd);
  control_map_ = std::move(*control_map);
  pool_map_ = std::move(*pool_map);
  tables_ = make_tables(control_map_.data(), plan);
  return success();
}

void RegionOwner::store_config(const Config& config) {
  const std::string text = config_to_json(config);
  for (std::size_t i = 0; i < tables_.config_text.size(); ++i) {
    tables_.config_text[i].store(i < text.size() ? static_cast<std::uint8_t>(text[i]) : 0,
                                 std::memory_order_relaxed);
  }
}

void RegionOwner::fill_header(const RegionPlan& plan, const std::string& socket_path, RegionState state) {
  constexpr auto relaxed = std::memory_order_relaxed;
  RegionHeader& h = *tables_.header;
  h.state.store(static_cast<std::uint32_t>(state), relaxed);
  instance_epoch_ = random_u64() | 1;
  const ProcessIdentity self = ProcessIdentity::self();
  h.layout_major.store(kLayoutMajor, relaxed);
  h.layout_minor.store(kLayoutMinor, relaxed);
  h.layout_fingerprint.store(layout_fingerprint(), relaxed);
  h.region_bytes.store(plan.total_bytes, relaxed);
  h.pool_bytes.store(pool_map_.size(), relaxed);
  h.instance_epoch.store(instance_epoch_, relaxed);
  h.created_unix_ns.store(unix_ns(), relaxed);
  h.hash_seed.store(random_u64(), relaxed);
  h.daemon_start_ticks.store(self.start_ticks, relaxed);
  h.daemon_pid.store(self.pid, relaxed);
  h.section_count.store(kSectionCount, relaxed);
  store_text(h.boot_id, boot_id());
  store_text(h.name, name_);
  store_text(h.socket_path, socket_path);
  for (std::uint32_t i = 0; i < kSectionCount; ++i) {
    const SectionPlan& from = plan.sections[i];
    Section& to = h.sections[i];
    to.kind.store(static_cast<std::uint32_t>(from.kind), relaxed);
    to.entry_bytes.store(from.entry_bytes, relaxed);
    to.offset.store(from.offset, relaxed);
    to.entries.store(from.entries, relaxed);
  }
  h.magic.store(kRegionMagic, relaxed);
  h.header_crc.store(header_crc(h), relaxed);
}

void RegionOwner::publish() {
  tables_.header->state.store(static_cast<std::uint32_t>(RegionState::ready), std::memory_order_release);
}

void RegionOwner::mark_draining() {
  tables_.header->state.store(static_cast<std::uint32_t>(RegionState::draining), std::memory_order_release);
}

}  // namespace hicache::daemon
