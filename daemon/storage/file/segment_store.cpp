#include "daemon/storage/file/segment_store.hpp"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <utility>

#include "daemon/config_keys.hpp"
#include "shm/clock.hpp"
#include "shm/crash_points.hpp"

namespace hicache::daemon {

SegmentStore::SegmentStore(const FileSettings& settings, std::vector<std::unique_ptr<Directory>> directories,
                           std::function<void(std::uint32_t)> poke, std::function<void()> room)
    : settings_(settings),
      poke_(std::move(poke)),
      room_(std::move(room)),
      directories_(directories.size()),
      index_(0, Hash{this}, Equal{this}) {
  for (std::size_t i = 0; i < directories.size(); ++i) directories_[i].directory = std::move(directories[i]);
}

RecordInfo SegmentStore::info_of(const StoredRecord& r) const {
  const Namespace& ns = namespaces_[r.ns];
  return {{r.page, ns.digest}, ns.shape, r.block * kDiskBlock, r.generation, r.payload_checksum};
}

std::optional<std::uint32_t> SegmentStore::find_namespace(const PrefixHash& digest,
                                                          const RecordShape& shape) const {
  const auto [first, last] = namespace_rows_.equal_range(digest.words[0]);
  for (auto at = first; at != last; ++at) {
    const Namespace& ns = namespaces_[at->second];
    if (ns.digest == digest && ns.shape == shape) return at->second;
  }
  return std::nullopt;
}

std::uint32_t SegmentStore::namespace_row(const PrefixHash& digest, const RecordShape& shape) {
  if (const auto row = find_namespace(digest, shape)) return *row;
  const auto row = static_cast<std::uint32_t>(namespaces_.size());
  namespaces_.push_back({digest, shape});
  namespace_rows_.emplace(digest.words[0], row);
  return row;
}

Segment& SegmentStore::add_segment(std::uint32_t directory, std::unique_ptr<SegmentFile> file,
                                   SegmentState state) {
  const auto hole = std::find(segments_.begin(), segments_.end(), nullptr);
  const auto id = static_cast<std::uint32_t>(hole - segments_.begin());
  if (hole == segments_.end()) segments_.emplace_back();
  segments_[id] = std::make_unique<Segment>();
  Segment& segment = *segments_[id];
  segment.id = id;
  segment.directory = directory;
  segment.file = std::move(file);
  segment.state = state;
  return segment;
}

void SegmentStore::insert(Segment& segment, const StoredRecord& record) {
  segment.records.push_back(record);
  const Place place{segment.id, static_cast<std::uint32_t>(segment.records.size() - 1)};
  const auto old = index_.find(Key{record.page, record.ns});
  if (old != index_.end()) {
    // The later generation counts; the other is left behind as an entry of nobody.
    if (record_of(*old).generation > record.generation) {
      segment.records.back().live = false;
      return;
    }
    drop(*segments_[old->segment], old->record);
  }
  index_.insert(place);
  ++segment.live;
}

void SegmentStore::drop(Segment& segment, std::uint32_t record) {
  StoredRecord& r = segment.records[record];
  if (!r.live) return;
  index_.erase(Place{segment.id, record});
  r.live = false;
  --segment.live;
}

void SegmentStore::drop_all(Segment& segment) {
  for (std::uint32_t i = 0; i < segment.records.size(); ++i) drop(segment, i);
}

Outcome SegmentStore::load() {
  const std::lock_guard lock(mutex_);
  std::uint64_t incomplete = 0;
  for (std::uint32_t d = 0; d < directories_.size(); ++d) {
    const Directory& directory = *directories_[d].directory;
    const auto names = directory.segment_names();
    if (!names) return names.error();
    std::vector<std::unique_ptr<SegmentFile>> files;
    for (const std::string& name : *names) {
      sequence_ = std::max(sequence_, segment_number(name) + 1);
      auto file = SegmentFile::open(directory, name);
      if (file) {
        sequence_ = std::max(sequence_, (*file)->identity().sequence + 1);
        files.push_back(std::move(*file));
        continue;
      }
      // What can't be read now may be readable another time; what is no segment never will be.
      const bool damaged = file.status() == Status::corrupt;
      spdlog::warn("storage: {}: {}", file.error().message, damaged ? "removed" : "left alone");
      if (damaged) SegmentFile::remove(directory, name);
    }
    HICACHE_CRASH_POINT(segments_opened);
    for (auto& file : files) {
      const auto contents = file->contents();
      if (!contents) return contents.error();
      incomplete += contents->dropped;
      // One that was still open is sealed now and not written any further: a write that the kernel still held
      // when its process was killed may yet arrive behind the last record.
      load_segment(
          add_segment(d, std::move(file), contents->sealed ? SegmentState::sealed : SegmentState::sealing),
          *contents);
    }
  }
  if (!index_.empty() || incomplete != 0) {
    spdlog::info("storage: {} pages in {} segments taken over, {} were incomplete", index_.size(),
                 segments_.size(), incomplete);
  }
  return success();
}

void SegmentStore::load_segment(Segment& segment, const SegmentFile::Contents& contents) {
  for (const RecordInfo& r : contents.records) {
    generation_ = std::max(generation_, r.generation + 1);
    insert(segment, {r.key.page, namespace_row(r.key.ns, r.shape),
                     static_cast<std::uint32_t>(r.offset / kDiskBlock), r.generation, r.payload_checksum});
  }
  segment.placed = static_cast<std::uint32_t>(segment.records.size());
}

bool SegmentStore::contains(const RecordKey& key, const RecordShape& shape) const {
  const std::lock_guard lock(mutex_);
  const auto row = find_namespace(key.ns, shape);
  if (!row) return false;
  const auto at = index_.find(Key{key.page, *row});
  return at != index_.end() && !directories_[segments_[at->segment]->directory].given_up;
}

std::optional<ReadPlace> SegmentStore::begin_read(const RecordKey& key, const RecordShape& shape) {
  const std::lock_guard lock(mutex_);
  const auto row = find_namespace(key.ns, shape);
  if (!row) return std::nullopt;
  const auto at = index_.find(Key{key.page, *row});
  if (at == index_.end()) return std::nullopt;
  Segment& segment = *segments_[at->segment];
  if (directories_[segment.directory].given_up) return std::nullopt;
  StoredRecord& record = segment.records[at->record];
  ++segment.readers;
  return ReadPlace{&segment, at->record, record.block * kDiskBlock + kDiskBlock, record.payload_checksum};
}

void SegmentStore::end_read(const ReadPlace& place, ReadEnd end, int error) {
  const std::lock_guard lock(mutex_);
  Segment& segment = *place.segment;
  assert(segment.readers > 0);
  switch (end) {
    case ReadEnd::good:
      segment.records[place.record].hot = true;
      note_success(segment.directory);
      break;
    case ReadEnd::corrupt:
      ++corrupt_pages_;
      drop(segment, place.record);
      break;
    case ReadEnd::failed:
      note_error(segment.directory, error, false);
      break;
  }
  --segment.readers;
  used_no_more(segment);
}

// Someone let go of it: its keeper may have waited for that.
void SegmentStore::used_no_more(Segment& segment) {
  if (segment.readers == 0 && segment.writers == 0 && segment.state != SegmentState::open &&
      segment.state != SegmentState::sealed) {
    poke_(segment.directory);
  }
}

bool SegmentStore::fits(const Segment& segment, const RecordShape& shape, std::uint64_t reserved) const {
  const std::uint64_t end =
      segment.next + reserved + shape.record_bytes() + footer_bytes(segment.placed + 1) + kDiskBlock;
  return end <= segment.file->identity().bytes;
}

void SegmentStore::give_place(Segment& segment, const RecordShape& shape, WritePlace& out) {
  out = {&segment, segment.file->identity().epoch, segment.next, generation_++};
  segment.next += shape.record_bytes();
  ++segment.placed;
  ++segment.writers;
}

// The directory's open segment with room for the page, a fresh one if need be. Nothing when there is none;
// `may_come` says then whether waiting helps.
Segment* SegmentStore::open_segment(std::uint32_t d, const RecordShape& shape, bool& may_come) {
  DirectoryState& directory = directories_[d];
  if (directory.given_up || directory.writes_paused) return nullptr;
  if (directory.open != nullptr && fits(*directory.open, shape, directory.reserved)) return directory.open;
  if (directory.open != nullptr && fits(*directory.open, shape, 0)) {
    may_come = true;
    return nullptr;  // until the keeper has used what it needs of it
  }
  if (directory.open != nullptr && directory.spare == nullptr && directory.no_room) {
    return nullptr;  // smaller pages may still find room in it
  }
  if (directory.open != nullptr) {
    directory.open->state = SegmentState::sealing;
    directory.open = nullptr;
    poke_(d);
  }
  if (directory.spare == nullptr) {
    may_come = may_come || !directory.no_room;
    return nullptr;
  }
  directory.open = std::exchange(directory.spare, nullptr);
  directory.open->state = SegmentState::open;
  directory.reserved = directory.recycles ? directory.open->file->identity().bytes / 2 : 0;
  poke_(d);  // for the next spare
  if (fits(*directory.open, shape, directory.reserved)) return directory.open;
  may_come = true;
  return nullptr;
}

SegmentStore::Room SegmentStore::place(const RecordShape& shape, const Segment* after, WritePlace& out) {
  if (!shape.plausible() ||
      kDiskBlock + shape.record_bytes() + footer_bytes(1) + kDiskBlock > settings_.segment_bytes) {
    return Room::too_large;
  }
  const std::lock_guard lock(mutex_);
  if (after != nullptr && after->state == SegmentState::open) {
    const DirectoryState& directory = directories_[after->directory];
    if (!directory.given_up && !directory.writes_paused && fits(*after, shape, directory.reserved)) {
      give_place(*segments_[after->id], shape, out);
      return Room::placed;
    }
  }
  bool may_come = false;
  for (std::size_t i = 0; i < directories_.size(); ++i) {
    const std::uint32_t d = turn_++ % static_cast<std::uint32_t>(directories_.size());
    if (Segment* segment = open_segment(d, shape, may_come)) {
      give_place(*segment, shape, out);
      return Room::placed;
    }
  }
  return may_come ? Room::wait : Room::none;
}

bool SegmentStore::commit(const WritePlace& place, const RecordKey& key, const RecordShape& shape,
                          std::uint64_t payload_checksum) {
  const std::lock_guard lock(mutex_);
  Segment& segment = *place.segment;
  assert(segment.writers > 0);
  --segment.writers;
  note_success(segment.directory);
  const bool kept = segment.state != SegmentState::condemned;
  if (kept) {
    insert(segment,
           {key.page, namespace_row(key.ns, shape), static_cast<std::uint32_t>(place.offset / kDiskBlock),
            place.generation, payload_checksum});
  }
  used_no_more(segment);
  return kept;
}

void SegmentStore::abandon(const WritePlace& place, int error) {
  const std::lock_guard lock(mutex_);
  Segment& segment = *place.segment;
  assert(segment.writers > 0);
  --segment.writers;
  if (error != 0) note_error(segment.directory, error, true);
  used_no_more(segment);
}

void SegmentStore::clear() {
  const std::lock_guard lock(mutex_);
  index_.clear();
  for (const auto& segment : segments_) {
    if (segment == nullptr) continue;
    for (StoredRecord& r : segment->records) r.live = false;
    segment->live = 0;
    segment->state = SegmentState::condemned;
  }
  for (std::uint32_t d = 0; d < directories_.size(); ++d) {
    directories_[d].open = nullptr;
    directories_[d].spare = nullptr;
    directories_[d].reserved = 0;
    directories_[d].recycles = false;
    directories_[d].no_room = false;
    poke_(d);
  }
}

void SegmentStore::close_open() {
  const std::lock_guard lock(mutex_);
  for (std::uint32_t d = 0; d < directories_.size(); ++d) {
    if (Segment* open = std::exchange(directories_[d].open, nullptr)) open->state = SegmentState::sealing;
  }
}

StorageStats SegmentStore::stats() const {
  const std::lock_guard lock(mutex_);
  StorageStats stats;
  stats.pages = index_.size();
  for (const auto& segment : segments_) {
    if (segment != nullptr) stats.bytes += segment->file->disk_bytes();
  }
  stats.capacity_bytes = settings_.capacity_bytes * directories_.size();
  stats.evicted_pages = evicted_pages_;
  stats.corrupt_pages = corrupt_pages_;
  stats.failed_operations = failed_operations_;
  return stats;
}

std::string SegmentStore::trouble(bool& usable) const {
  const std::lock_guard lock(mutex_);
  std::string text;
  usable = false;
  for (const DirectoryState& d : directories_) {
    usable = usable || !d.given_up;
    if (d.trouble.empty()) continue;
    text += (text.empty() ? "" : "; ") + d.trouble;
  }
  return text;
}

bool SegmentStore::direct() const {
  const std::lock_guard lock(mutex_);
  return std::all_of(segments_.begin(), segments_.end(),
                     [](const auto& s) { return s == nullptr || s->file->direct(); });
}

void SegmentStore::note_error(std::uint32_t d, int error, bool write) {
  DirectoryState& directory = directories_[d];
  ++failed_operations_;
  ++directory.errors;
  const std::string what = directory.directory->path() + ": " + std::strerror(error);
  const bool full = error == ENOSPC || error == EDQUOT;
  const bool was_up = !directory.given_up && !directory.writes_paused;
  if (write && (full || error == EROFS || error == EACCES || error == EPERM)) {
    directory.writes_paused = true;
    directory.trouble = what + ", not written to for now";
  } else if (directory.errors >= settings_.max_errors) {
    directory.given_up = true;
    directory.trouble = what + ", not used for now after " + std::to_string(directory.errors) + " errors";
  } else {
    return;
  }
  directory.retry_at_ns = monotonic_ns() + std::uint64_t{settings_.retry_ms} * 1'000'000;
  if (was_up) spdlog::warn("storage: {}", directory.trouble);
  room_();  // writes that wait for this directory must go elsewhere, or end
}

}  // namespace hicache::daemon
