// Which page lies where: the index over all segments of all directories, the places for new pages, and the
// states that segments and directories go through. Only memory: who moves the bytes asks here first and
// reports after.
//
// Hot pages (read since they were written) of a segment that is evicted are written again into the open one.
// Half of an open segment is reserved for them until its directory's keeper has made the next spare.
//
//   segment: spare -> open -> sealing -> sealed -> evicting -> spare again, or removed
//
// A segment is only written while it is open, and it leaves `sealing` once no write is in flight. Nothing of
// it is given to new pages before no read is in flight. `condemned` is the way out by clear(): it is removed
// as soon as nobody uses it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "daemon/storage/backend.hpp"
#include "daemon/storage/file/directory.hpp"
#include "daemon/storage/file/file_settings.hpp"
#include "daemon/storage/file/segment_file.hpp"

namespace hicache::daemon {

enum class SegmentState : std::uint8_t { spare, open, sealing, sealed, evicting, condemned };

// A page in a segment. Kept small, because there may be millions.
struct StoredRecord {
  PrefixHash page;
  std::uint32_t ns = 0;     // row of the store's namespaces
  std::uint32_t block = 0;  // of its header, in blocks of the disk
  std::uint64_t generation = 0;
  std::uint64_t payload_checksum = 0;
  bool live = true;  // in the index
  bool hot = false;  // read since it was written
};

// Everything but `file` is guarded by the store's lock; `file` changes only in the keeper of its directory
// and while no page operation uses the segment.
struct Segment {
  std::uint32_t id = 0;
  std::uint32_t directory = 0;
  std::unique_ptr<SegmentFile> file;
  SegmentState state = SegmentState::spare;
  std::uint64_t next = kDiskBlock;  // where the next record goes
  std::uint32_t placed = 0;         // records that have a place, committed or not: their footer needs room
  std::uint32_t readers = 0;        // in flight
  std::uint32_t writers = 0;
  std::uint64_t live = 0;  // records that are in the index
  std::vector<StoredRecord> records;
};

// Where a page is to be read. The segment stays as it is until end_read().
struct ReadPlace {
  Segment* segment = nullptr;
  std::uint32_t record = 0;
  std::uint64_t payload_offset = 0;
  std::uint64_t payload_checksum = 0;
};

// Where a page is to be written. The segment stays open or sealing until commit() or abandon().
struct WritePlace {
  Segment* segment = nullptr;
  std::uint64_t epoch = 0;
  std::uint64_t offset = 0;
  std::uint64_t generation = 0;
};

// Thread safety: every method may be called from any thread, the keeper_ ones from the directory's keeper
// only.
class SegmentStore {
 public:
  // `poke(directory)` is called, with the lock held, when there is work for the directory's keeper; `room()`
  // when a write that had to wait may try again.
  SegmentStore(const FileSettings& settings, std::vector<std::unique_ptr<Directory>> directories,
               std::function<void(std::uint32_t)> poke, std::function<void()> room);

  // Takes over what earlier runs left, before anything else is called. system_error where a directory can't
  // be listed.
  Outcome load();

  [[nodiscard]] bool contains(const RecordKey& key, const RecordShape& shape) const;
  std::optional<ReadPlace> begin_read(const RecordKey& key, const RecordShape& shape);
  // What became of it: corrupt takes the page out of the index, an error counts against the directory.
  enum class ReadEnd : std::uint8_t { good, corrupt, failed };
  void end_read(const ReadPlace& place, ReadEnd end, int error = 0);

  enum class Room : std::uint8_t { placed, wait, none, too_large };
  // A place for a page; behind the last one of `after` where that still goes, so that both are one transfer.
  Room place(const RecordShape& shape, const Segment* after, WritePlace& out);
  // The page is on the disk: it can be found from now on. False when it was cleared away meanwhile.
  bool commit(const WritePlace& place, const RecordKey& key, const RecordShape& shape,
              std::uint64_t payload_checksum);
  void abandon(const WritePlace& place, int error);

  // Forgets every page at once; the keepers remove the files.
  void clear();

  // Nothing is written any more: what is open shall be sealed.
  void close_open();

  [[nodiscard]] StorageStats stats() const;
  // What is wrong with directories, "" = nothing; and whether one of them can be used.
  [[nodiscard]] std::string trouble(bool& usable) const;
  [[nodiscard]] bool direct() const;

  // What the keeper of a directory asks and reports.
  [[nodiscard]] const Directory& keeper_directory(std::uint32_t directory) const {
    return *directories_[directory].directory;
  }
  // A segment without users in that state, the oldest first. For sealed ones: those without pages before
  // others.
  Segment* keeper_next(std::uint32_t directory, SegmentState state);
  [[nodiscard]] bool keeper_has(std::uint32_t directory, SegmentState state) const;
  [[nodiscard]] bool keeper_needs_spare(std::uint32_t directory) const;
  [[nodiscard]] std::uint64_t keeper_disk_bytes(std::uint32_t directory) const;
  std::vector<RecordInfo> keeper_records(const Segment& segment) const;
  void keeper_sealed(Segment& segment);
  // `last`: no other can be made after it without an eviction.
  void keeper_add_spare(std::uint32_t directory, std::unique_ptr<SegmentFile> file, bool last);
  // Takes the cold pages of a sealed segment out of the index and returns the hot ones, which can still be
  // read.
  std::vector<RecordInfo> keeper_begin_eviction(Segment& segment);
  // A place for a hot page in the open segment of the directory, also in what is reserved.
  bool keeper_place(std::uint32_t directory, const RecordShape& shape, WritePlace& out);
  // A hot page has been written elsewhere.
  void keeper_moved(const Segment& from, const RecordInfo& record, const WritePlace& to);
  // Takes the rest out. True once nobody reads from it any more.
  bool keeper_end_eviction(Segment& segment);
  // Its file has begun a new life.
  void keeper_recycled(Segment& segment);
  // Gives the segment up and returns its file's name.
  std::string keeper_remove(Segment& segment);
  // The keeper has done what it could about a spare: nothing more is moved.
  void keeper_unreserve(std::uint32_t directory);
  void keeper_no_room(std::uint32_t directory, bool none);
  std::uint64_t keeper_next_sequence();
  void keeper_failed(std::uint32_t directory, int error, bool write);
  // The directory can't be used at all, for that reason, until keeper_probed() says otherwise.
  void keeper_lost(std::uint32_t directory, const std::string& trouble);
  // Whether it is time to look whether a directory that was given up works again.
  [[nodiscard]] bool keeper_should_probe(std::uint32_t directory) const;
  void keeper_probed(std::uint32_t directory, const std::string& trouble);
  [[nodiscard]] bool keeper_usable(std::uint32_t directory) const;

 private:
  struct Namespace {
    PrefixHash digest;
    RecordShape shape;
  };
  struct Place {  // of a record, 8 bytes
    std::uint32_t segment = 0;
    std::uint32_t record = 0;
    friend bool operator==(const Place&, const Place&) = default;
  };
  struct Key {
    PrefixHash page;
    std::uint32_t ns = 0;
    friend bool operator==(const Key&, const Key&) = default;
  };
  // The index holds places only; their keys are in the records.
  struct Hash {
    using is_transparent = void;
    const SegmentStore* store;
    std::size_t operator()(const Key& key) const { return key.page.words[0] ^ (std::size_t{key.ns} << 32); }
    std::size_t operator()(const Place& place) const { return (*this)(store->key_of(place)); }
  };
  struct Equal {
    using is_transparent = void;
    const SegmentStore* store;
    bool operator()(const Place& a, const Place& b) const { return store->key_of(a) == store->key_of(b); }
    bool operator()(const Key& a, const Place& b) const { return a == store->key_of(b); }
    bool operator()(const Place& a, const Key& b) const { return store->key_of(a) == b; }
  };
  struct DirectoryState {
    std::unique_ptr<Directory> directory;
    Segment* open = nullptr;
    Segment* spare = nullptr;
    bool no_room = false;        // no spare can be had for now
    bool recycles = false;       // the next spare will cost an eviction, whose hot pages need room
    std::uint64_t reserved = 0;  // bytes of the open segment that are kept for them
    bool given_up = false;       // neither read nor written
    bool writes_paused = false;
    std::uint32_t errors = 0;       // in a row
    std::uint64_t retry_at_ns = 0;  // when given up or paused
    std::string trouble;
  };

  [[nodiscard]] StoredRecord& record_of(const Place& place) const {
    return segments_[place.segment]->records[place.record];
  }
  [[nodiscard]] Key key_of(const Place& place) const {
    const StoredRecord& r = record_of(place);
    return {r.page, r.ns};
  }
  [[nodiscard]] RecordInfo info_of(const StoredRecord& record) const;
  [[nodiscard]] std::optional<std::uint32_t> find_namespace(const PrefixHash& digest,
                                                            const RecordShape& shape) const;
  std::uint32_t namespace_row(const PrefixHash& digest, const RecordShape& shape);
  Segment& add_segment(std::uint32_t directory, std::unique_ptr<SegmentFile> file, SegmentState state);
  void load_segment(Segment& segment, const SegmentFile::Contents& contents);
  [[nodiscard]] bool fits(const Segment& segment, const RecordShape& shape, std::uint64_t reserved) const;
  void give_place(Segment& segment, const RecordShape& shape, WritePlace& out);
  Segment* open_segment(std::uint32_t directory, const RecordShape& shape, bool& may_come);
  void insert(Segment& segment, const StoredRecord& record);
  void drop(Segment& segment, std::uint32_t record);
  void drop_all(Segment& segment);
  void used_no_more(Segment& segment);
  void note_error(std::uint32_t directory, int error, bool write);
  void note_success(std::uint32_t directory) { directories_[directory].errors = 0; }

  const FileSettings settings_;
  const std::function<void(std::uint32_t)> poke_;
  const std::function<void()> room_;
  mutable std::mutex mutex_;
  std::vector<DirectoryState> directories_;  // the vector and Directory are constant, the rest is guarded
  std::vector<std::unique_ptr<Segment>> segments_;  // by id; holes where one was removed
  std::vector<Namespace> namespaces_;
  std::unordered_multimap<std::uint64_t, std::uint32_t> namespace_rows_;  // by the digest's first word
  std::unordered_set<Place, Hash, Equal> index_;
  std::uint32_t turn_ = 0;  // directory that gets the next page
  std::uint64_t sequence_ = 1;
  std::uint64_t generation_ = 1;
  std::uint64_t evicted_pages_ = 0;
  std::uint64_t corrupt_pages_ = 0;
  std::uint64_t failed_operations_ = 0;
};

}  // namespace hicache::daemon
