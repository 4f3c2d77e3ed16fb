// Creates the daemon's shared memory objects or takes over those of a dead one, keeps them for its life, and
// removes them at its end. Only one daemon of a name can own them at a time.
#pragma once

#include <cstdint>
#include <string>

#include "daemon/config.hpp"
#include "daemon/region_takeover.hpp"
#include "shm/fd.hpp"
#include "shm/region.hpp"
#include "shm/shared_memory.hpp"
#include "shm/status.hpp"

namespace hicache::daemon {

// Table sizes for a configuration.
RegionShape shape_for(const Config& config);
// The pool as it is made: whole segments.
std::uint64_t usable_pool_bytes(const Config& config);

// The lock file hicache.NAME.lock in /dev/shm, held from construction to destruction. It is removed when it
// goes.
class NameLock {
 public:
  // busy when another live daemon holds it, with its pid in the message.
  static Result<NameLock> acquire(const std::string& name);
  NameLock(NameLock&&) noexcept = default;
  NameLock& operator=(NameLock&&) noexcept = delete;
  ~NameLock();

  // False once somebody has removed the lock file: another daemon may have the name then.
  [[nodiscard]] bool named() const;

 private:
  NameLock(UniqueFd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}
  UniqueFd fd_;
  std::string path_;
};

// Not thread-safe; the tables it hands out belong to the coordinator.
class RegionOwner {
 public:
  // Takes the name, then the region of a dead daemon of that name where it fits this configuration, else
  // creates fresh objects in its place, all memory reserved; the log says which and why. The header is
  // complete, but its state stays `initialising` or `recovering` until publish(), so that no tool takes the
  // tables for valid before the coordinator has prepared them. busy when the name is taken or the old process
  // has not ended; no_space with what to do when /dev/shm is too small.
  enum class Start { take_over, fresh };
  static Result<RegionOwner> create(const Config& config, const std::string& socket_path,
                                    Start start = Start::take_over);
  RegionOwner(RegionOwner&&) noexcept;
  RegionOwner& operator=(RegionOwner&&) noexcept = delete;
  // Marks the region closed and removes the objects, unless region.keep_on_exit says otherwise.
  ~RegionOwner();

  // Lets readers in. SYNC region-state: release; pairs with the reader's acquire of the state.
  void publish();
  // The daemon has started: from now on its end removes the objects, unless region.keep_on_exit says
  // otherwise. Before, a start that fails leaves a region that was taken over as it found it.
  void settle() { settled_ = true; }
  // Tells readers that the daemon is stopping.
  void mark_draining();

  // The tables hold an earlier daemon's pages.
  [[nodiscard]] bool taken_over() const { return taken_over_; }
  [[nodiscard]] const Tables& tables() const { return tables_; }
  [[nodiscard]] std::uint8_t* pool() const { return static_cast<std::uint8_t*>(pool_map_.data()); }
  [[nodiscard]] std::uint64_t pool_bytes() const { return pool_map_.size(); }
  [[nodiscard]] std::uint64_t region_bytes() const { return control_map_.size(); }
  [[nodiscard]] std::uint64_t instance_epoch() const { return instance_epoch_; }
  // Read-only descriptor of the control region, to be sent to clients.
  [[nodiscard]] int control_read_only_fd() const { return control_read_only_.get(); }
  // Descriptor of the pool, open for writing, to be sent to ranks that may map it.
  [[nodiscard]] int pool_fd() const { return pool_fd_.get(); }

 private:
  RegionOwner(NameLock lock, const Config& config);
  Outcome build(const Config& config, const RegionPlan& plan, const std::string& socket_path);
  Outcome take_over(const Config& config, const RegionPlan& plan, const std::string& socket_path,
                    const TakeoverRegion& region);
  Outcome map(int control, int pool, const RegionPlan& plan, std::uint64_t pool_bytes);
  void store_config(const Config& config);
  void fill_header(const RegionPlan& plan, const std::string& socket_path, RegionState state);

  NameLock lock_;
  std::string name_;
  bool keep_on_exit_ = false;
  bool created_ = false;
  bool taken_over_ = false;
  bool settled_ = false;
  std::uint64_t instance_epoch_ = 0;
  UniqueFd control_read_only_;
  UniqueFd pool_fd_;
  Mapping control_map_;
  Mapping pool_map_;
  Tables tables_;
};

}  // namespace hicache::daemon
