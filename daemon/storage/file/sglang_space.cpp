#include "daemon/storage/file/sglang_space.hpp"

#include <algorithm>
#include <vector>

namespace hicache::daemon {
namespace {

constexpr std::uint64_t kLookShare = 20;  // of the capacity, written since the last look: time for another

}  // namespace

bool SglangSpace::take(std::uint64_t bytes) {
  const std::uint64_t blocks = align_up(bytes, kPoolAlignment);
  const std::uint64_t free = files_.free_bytes();
  if (free < blocks || free - blocks < settings_.min_free_bytes) return false;
  const std::lock_guard lock(mutex_);
  if (limited() && used_ + blocks > settings_.capacity_bytes) return false;
  used_ += blocks;
  written_ += blocks;
  pending_ += blocks;
  return true;
}

void SglangSpace::settle(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  pending_ -= align_up(bytes, kPoolAlignment);
}

void SglangSpace::keep() {
  if (!limited()) return;
  const std::uint64_t target = settings_.capacity_bytes - settings_.capacity_bytes / 10;
  std::uint64_t unseen = 0;
  {
    const std::lock_guard lock(mutex_);
    const bool full = used_ > target;
    if (looked_ && !full && written_ < settings_.capacity_bytes / kLookShare) return;
    looked_ = true;
    written_ = 0;
    // Their files may come after the look. Those that it finds are counted twice, until the next one.
    unseen = pending_;
  }
  std::vector<SglangFiles::File> files = files_.list(settings_.sglang.model);
  std::uint64_t used = 0;
  for (const auto& file : files) used += file.disk_bytes;
  std::uint64_t evicted = 0;
  if (used > target) {
    std::sort(files.begin(), files.end(), [](const auto& a, const auto& b) { return a.used_ns < b.used_ns; });
    for (const auto& file : files) {
      if (used <= target) break;
      files_.remove(file.name);
      used -= file.disk_bytes;
      ++evicted;
    }
  }
  const std::lock_guard lock(mutex_);
  used_ = used + unseen + written_;
  evicted_ += evicted;
}

void SglangSpace::clear() {
  for (const auto& file : files_.list(settings_.sglang.model)) files_.remove(file.name);
  const std::lock_guard lock(mutex_);
  used_ = pending_;
  written_ = 0;
}

std::uint64_t SglangSpace::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return used_;
}

std::uint64_t SglangSpace::evicted_files() const {
  const std::lock_guard lock(mutex_);
  return evicted_;
}

}  // namespace hicache::daemon
