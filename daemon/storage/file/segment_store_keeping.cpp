// What keepers ask of the store and report to it.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cassert>
#include <utility>

#include "daemon/storage/file/segment_store.hpp"
#include "shm/clock.hpp"

namespace hicache::daemon {

Segment* SegmentStore::keeper_next(std::uint32_t directory, SegmentState state) {
  const std::lock_guard lock(mutex_);
  Segment* next = nullptr;
  const auto before = [](const Segment& a, const Segment& b) {
    if ((a.live == 0) != (b.live == 0)) return a.live == 0;
    return a.file->identity().sequence < b.file->identity().sequence;
  };
  for (const auto& segment : segments_) {
    if (segment == nullptr || segment->directory != directory || segment->state != state) continue;
    // One that is read can be chosen for eviction: that takes time anyway and waits for the readers at its
    // end.
    if (segment->writers != 0 || (state == SegmentState::condemned && segment->readers != 0)) continue;
    if (next == nullptr || before(*segment, *next)) next = segment.get();
  }
  return next;
}

bool SegmentStore::keeper_has(std::uint32_t directory, SegmentState state) const {
  const std::lock_guard lock(mutex_);
  return std::any_of(segments_.begin(), segments_.end(), [&](const auto& s) {
    return s != nullptr && s->directory == directory && s->state == state;
  });
}

bool SegmentStore::keeper_needs_spare(std::uint32_t directory) const {
  const std::lock_guard lock(mutex_);
  const DirectoryState& d = directories_[directory];
  return d.spare == nullptr && !d.given_up && !d.writes_paused;
}

std::uint64_t SegmentStore::keeper_disk_bytes(std::uint32_t directory) const {
  const std::lock_guard lock(mutex_);
  std::uint64_t bytes = 0;
  for (const auto& segment : segments_) {
    if (segment != nullptr && segment->directory == directory) bytes += segment->file->disk_bytes();
  }
  return bytes;
}

std::vector<RecordInfo> SegmentStore::keeper_records(const Segment& segment) const {
  const std::lock_guard lock(mutex_);
  std::vector<RecordInfo> records;
  records.reserve(segment.live);
  for (const StoredRecord& r : segment.records) {
    if (r.live) records.push_back(info_of(r));
  }
  return records;
}

void SegmentStore::keeper_sealed(Segment& segment) {
  const std::lock_guard lock(mutex_);
  if (segment.state == SegmentState::sealing) segment.state = SegmentState::sealed;
}

void SegmentStore::keeper_add_spare(std::uint32_t directory, std::unique_ptr<SegmentFile> file, bool last) {
  const std::lock_guard lock(mutex_);
  DirectoryState& d = directories_[directory];
  assert(d.spare == nullptr);
  d.spare = &add_segment(directory, std::move(file), SegmentState::spare);
  d.recycles = last;
  d.no_room = false;
  room_();
}

std::vector<RecordInfo> SegmentStore::keeper_begin_eviction(Segment& segment) {
  const std::lock_guard lock(mutex_);
  std::vector<RecordInfo> hot;
  if (segment.state != SegmentState::sealed) return hot;  // cleared meanwhile
  segment.state = SegmentState::evicting;
  for (std::uint32_t i = 0; i < segment.records.size(); ++i) {
    const StoredRecord& r = segment.records[i];
    if (!r.live) continue;
    if (r.hot) {
      hot.push_back(info_of(r));
    } else {
      drop(segment, i);
      ++evicted_pages_;
    }
  }
  return hot;
}

bool SegmentStore::keeper_place(std::uint32_t directory, const RecordShape& shape, WritePlace& out) {
  const std::lock_guard lock(mutex_);
  DirectoryState& d = directories_[directory];
  if (d.open == nullptr || d.given_up || d.writes_paused || !fits(*d.open, shape, 0)) return false;
  d.reserved -= std::min(d.reserved, shape.record_bytes());
  give_place(*d.open, shape, out);
  return true;
}

void SegmentStore::keeper_moved(const Segment& from, const RecordInfo& record, const WritePlace& to) {
  const std::lock_guard lock(mutex_);
  Segment& target = *to.segment;
  --target.writers;
  if (target.state != SegmentState::condemned) {
    const auto row = namespace_row(record.key.ns, record.shape);
    const auto at = index_.find(Key{record.key.page, row});
    // Only where it is still that very record: it may have been found corrupt, or cleared.
    if (at != index_.end() && at->segment == from.id && record_of(*at).block * kDiskBlock == record.offset) {
      insert(target, {record.key.page, row, static_cast<std::uint32_t>(to.offset / kDiskBlock), to.generation,
                      record.payload_checksum});
    }
  }
  used_no_more(target);
}

bool SegmentStore::keeper_end_eviction(Segment& segment) {
  const std::lock_guard lock(mutex_);
  evicted_pages_ += segment.live;
  drop_all(segment);
  return segment.readers == 0;
}

void SegmentStore::keeper_recycled(Segment& segment) {
  const std::lock_guard lock(mutex_);
  assert(segment.readers == 0 && segment.writers == 0 && segment.live == 0);
  segment.records.clear();
  segment.next = kDiskBlock;
  segment.placed = 0;
  if (segment.state != SegmentState::evicting) return;  // cleared meanwhile
  DirectoryState& d = directories_[segment.directory];
  assert(d.spare == nullptr);
  segment.state = SegmentState::spare;
  d.spare = &segment;
  d.recycles = true;
  d.no_room = false;
  room_();
}

std::string SegmentStore::keeper_remove(Segment& segment) {
  const std::lock_guard lock(mutex_);
  assert(segment.readers == 0 && segment.writers == 0 && segment.live == 0);
  std::string name = segment.file->name();
  segments_[segment.id].reset();
  return name;
}

void SegmentStore::keeper_unreserve(std::uint32_t directory) {
  const std::lock_guard lock(mutex_);
  DirectoryState& d = directories_[directory];
  // Without a spare the open segment is younger than this turn of the keeper, or the next turn tries again.
  if (d.reserved == 0 || (d.spare == nullptr && !d.no_room)) return;
  d.reserved = 0;
  room_();
}

void SegmentStore::keeper_no_room(std::uint32_t directory, bool none) {
  const std::lock_guard lock(mutex_);
  if (directories_[directory].no_room == none) return;
  directories_[directory].no_room = none;
  room_();
}

std::uint64_t SegmentStore::keeper_next_sequence() {
  const std::lock_guard lock(mutex_);
  return sequence_++;
}

void SegmentStore::keeper_failed(std::uint32_t directory, int error, bool write) {
  const std::lock_guard lock(mutex_);
  note_error(directory, error, write);
}

void SegmentStore::keeper_lost(std::uint32_t directory, const std::string& trouble) {
  const std::lock_guard lock(mutex_);
  DirectoryState& d = directories_[directory];
  d.given_up = true;
  d.trouble = d.directory->path() + ": " + trouble + ", not used for now";
  d.retry_at_ns = monotonic_ns() + std::uint64_t{settings_.retry_ms} * 1'000'000;
  spdlog::warn("storage: {}", d.trouble);
  room_();
}

bool SegmentStore::keeper_should_probe(std::uint32_t directory) const {
  const std::lock_guard lock(mutex_);
  const DirectoryState& d = directories_[directory];
  return (d.given_up || d.writes_paused) && monotonic_ns() >= d.retry_at_ns;
}

void SegmentStore::keeper_probed(std::uint32_t directory, const std::string& trouble) {
  const std::lock_guard lock(mutex_);
  DirectoryState& d = directories_[directory];
  if (trouble.empty()) {
    spdlog::info("storage: {} is used again", d.directory->path());
    d.given_up = d.writes_paused = d.no_room = false;
    d.errors = 0;
    d.trouble.clear();
    room_();
    return;
  }
  d.trouble =
      d.directory->path() + ": " + trouble + (d.given_up ? ", not used for now" : ", not written to for now");
  d.retry_at_ns = monotonic_ns() + std::uint64_t{settings_.retry_ms} * 1'000'000;
}

bool SegmentStore::keeper_usable(std::uint32_t directory) const {
  const std::lock_guard lock(mutex_);
  return !directories_[directory].given_up;
}

}  // namespace hicache::daemon
