#include "daemon/storage/file/segment_keeper.hpp"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <utility>

#include "daemon/integrity/payload_checksum.hpp"
#include "shm/crash_points.hpp"

namespace hicache::daemon {
namespace {

constexpr std::chrono::seconds kTurn{1};              // limits and presence are looked at so often
constexpr std::chrono::milliseconds kReaderTurn{50};  // a wait for readers, without a poke
// Of a segment, at most this part is written again: so every eviction makes room.
constexpr std::uint64_t kHotShare = 2;

}  // namespace

SegmentKeeper::SegmentKeeper(SegmentStore& store, const FileSettings& settings, std::uint32_t directory)
    : store_(store), settings_(settings), directory_(directory) {}

SegmentKeeper::~SegmentKeeper() {
  stop();
}

void SegmentKeeper::start() {
  thread_ = std::thread([this] { run(); });
}

void SegmentKeeper::stop() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void SegmentKeeper::poke() {
  {
    const std::lock_guard lock(mutex_);
    poked_ = true;
  }
  wake_.notify_one();
}

bool SegmentKeeper::stopping() {
  const std::lock_guard lock(mutex_);
  return stop_;
}

void SegmentKeeper::run() {
  for (bool last = false; !last;) {
    try {
      turn();
    } catch (const std::exception& e) {  // memory, in practice: the next turn may have it
      spdlog::error("storage: upkeep of {}: {}", store_.keeper_directory(directory_).path(), e.what());
    }
    std::unique_lock lock(mutex_);
    wake_.wait_for(lock, kTurn, [this] { return poked_ || stop_; });
    last = stop_;
    poked_ = false;
  }
  try {
    seal();
  } catch (const std::exception& e) {
    spdlog::error("storage: {}: not sealed: {}", store_.keeper_directory(directory_).path(), e.what());
  }
}

void SegmentKeeper::turn() {
  if (store_.keeper_should_probe(directory_)) probe();
  if (store_.keeper_usable(directory_) && !store_.keeper_directory(directory_).present()) {
    store_.keeper_lost(directory_, "is gone, or another directory is in its place");
  }
  if (!store_.keeper_usable(directory_)) return;
  remove_condemned();
  // The spare first, because writers may wait for it; once more where it takes a segment that is sealed now.
  if (store_.keeper_needs_spare(directory_)) make_spare();
  seal();
  if (store_.keeper_needs_spare(directory_)) make_spare();
  store_.keeper_unreserve(directory_);
  hold_limits();
}

void SegmentKeeper::probe() {
  const Directory& directory = store_.keeper_directory(directory_);
  if (!directory.present()) {
    store_.keeper_probed(directory_, "is gone, or another directory is in its place");
    return;
  }
  const int error = directory.try_write();
  store_.keeper_probed(directory_, error == 0 ? "" : std::strerror(error));
}

void SegmentKeeper::remove_condemned() {
  while (Segment* segment = store_.keeper_next(directory_, SegmentState::condemned)) remove(*segment);
}

void SegmentKeeper::remove(Segment& segment) {
  SegmentFile::remove(store_.keeper_directory(directory_), store_.keeper_remove(segment));
}

void SegmentKeeper::seal() {
  while (Segment* segment = store_.keeper_next(directory_, SegmentState::sealing)) {
    const Outcome sealed = segment->file->seal(store_.keeper_records(*segment));
    // Without its footer it is as good as with it until the next start, which has to scan it then.
    if (!sealed) store_.keeper_failed(directory_, sealed.error().system_errno, true);
    store_.keeper_sealed(*segment);
  }
}

void SegmentKeeper::make_spare() {
  const Directory& directory = store_.keeper_directory(directory_);
  while (!stopping()) {
    const auto free = directory.free_bytes();
    if (!free) return store_.keeper_failed(directory_, free.error().system_errno, true);
    const std::uint64_t used = store_.keeper_disk_bytes(directory_);
    const std::uint64_t bytes = settings_.segment_bytes;
    const auto room_for = [&](std::uint64_t more) {
      return (settings_.capacity_bytes == 0 || used + more <= settings_.capacity_bytes) && *free >= more &&
             *free - more >= settings_.min_free_bytes;
    };
    if (room_for(bytes)) {
      auto made = SegmentFile::create(directory, store_.keeper_next_sequence(), bytes);
      if (made) return store_.keeper_add_spare(directory_, std::move(*made), !room_for(2 * bytes));
      if (made.status() != Status::no_space) {
        return store_.keeper_failed(directory_, made.error().system_errno, true);
      }
    }
    Segment* victim = store_.keeper_next(directory_, SegmentState::sealed);
    if (victim == nullptr) {
      // One that is being sealed will be one; without any, pages have to be turned away.
      return store_.keeper_no_room(directory_, !store_.keeper_has(directory_, SegmentState::sealing));
    }
    const bool reusable = victim->file->identity().bytes == bytes && *free >= settings_.min_free_bytes &&
                          (settings_.capacity_bytes == 0 || used <= settings_.capacity_bytes);
    if (!evict(*victim, true)) return;
    if (!reusable) {
      remove(*victim);
      continue;
    }
    HICACHE_CRASH_POINT(segment_evicted);
    const Outcome begun = victim->file->begin_life(store_.keeper_next_sequence());
    HICACHE_CRASH_POINT(segment_begun_again);
    if (begun) return store_.keeper_recycled(*victim);
    store_.keeper_failed(directory_, begun.error().system_errno, true);
    return remove(*victim);
  }
}

void SegmentKeeper::hold_limits() {
  const Directory& directory = store_.keeper_directory(directory_);
  while (!stopping()) {
    const auto free = directory.free_bytes();
    if (!free) return;
    const std::uint64_t used = store_.keeper_disk_bytes(directory_);
    const bool over = settings_.capacity_bytes != 0 && used > settings_.capacity_bytes;
    if (!over && *free >= settings_.min_free_bytes) return;
    Segment* victim = store_.keeper_next(directory_, SegmentState::sealed);
    if (victim == nullptr || !evict(*victim, false)) return;
    remove(*victim);
  }
}

bool SegmentKeeper::evict(Segment& segment, bool keep_hot) {
  std::vector<RecordInfo> hot = store_.keeper_begin_eviction(segment);
  if (keep_hot) {
    // The youngest first, where not all of them may stay.
    std::reverse(hot.begin(), hot.end());
    std::uint64_t room = segment.file->identity().bytes / kHotShare;
    for (const RecordInfo& record : hot) {
      if (record.shape.record_bytes() > room || stopping()) break;
      room -= record.shape.record_bytes();
      move_hot(segment, record);
    }
  }
  while (!store_.keeper_end_eviction(segment)) {
    std::unique_lock lock(mutex_);
    if (stop_) return false;
    wake_.wait_for(lock, kReaderTurn, [this] { return poked_ || stop_; });
    poked_ = false;
  }
  return true;
}

void SegmentKeeper::move_hot(const Segment& from, const RecordInfo& record) {
  const AlignedBuffer buffer(record.shape.record_bytes());
  if (const int error = read_at(from.file->fd(), buffer.bytes(), record.offset); error != 0) {
    return store_.keeper_failed(directory_, error, false);
  }
  std::vector<std::span<const std::byte>> shards;
  for (std::uint32_t i = 0; i < record.shape.shards; ++i) {
    shards.push_back(
        buffer.bytes().subspan(kDiskBlock + i * record.shape.shard_stride(), record.shape.shard_bytes));
  }
  if (payload_checksum(shards) != record.payload_checksum) return;  // goes with the segment
  WritePlace to;
  if (!store_.keeper_place(directory_, record.shape, to)) return;
  RecordInfo moved = record;
  moved.offset = to.offset;
  moved.generation = to.generation;
  make_record_header(buffer.bytes().first(kDiskBlock), to.epoch, moved);
  if (const int error = write_at(to.segment->file->fd(), buffer.bytes(), to.offset); error != 0) {
    return store_.abandon(to, error);
  }
  HICACHE_CRASH_POINT(segment_hot_moved);
  store_.keeper_moved(from, record, to);
}

}  // namespace hicache::daemon
