// One segment file: made, taken over, sealed and read by calls that block. Pages are moved by the engines,
// which only use its descriptor.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "daemon/storage/file/directory.hpp"
#include "daemon/storage/file/disk_format.hpp"
#include "shm/fd.hpp"
#include "shm/status.hpp"

namespace hicache::daemon {

// Memory for O_DIRECT.
class AlignedBuffer {
 public:
  explicit AlignedBuffer(std::size_t bytes);
  AlignedBuffer(AlignedBuffer&& other) noexcept;
  AlignedBuffer& operator=(AlignedBuffer&&) = delete;
  ~AlignedBuffer();
  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::span<std::byte> bytes() const { return {data_, size_}; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// Whole transfers of aligned bytes. The errno, 0 = done; ENODATA where the file ends before.
int read_at(int fd, std::span<std::byte> bytes, std::uint64_t offset);
int write_at(int fd, std::span<const std::byte> bytes, std::uint64_t offset);

// Thread safety: constant calls from any thread; begin_life() while nobody uses the file.
class SegmentFile {
 public:
  // A new file of `bytes`, with all its blocks, and a header. no_space, or system_error with the errno.
  static Result<std::unique_ptr<SegmentFile>> create(const Directory& directory, std::uint64_t sequence,
                                                     std::uint64_t bytes);
  // One that is there. corrupt when it is none, or shorter than it says.
  static Result<std::unique_ptr<SegmentFile>> open(const Directory& directory, const std::string& name);
  // Removes a name of the directory.
  static void remove(const Directory& directory, const std::string& name);

  [[nodiscard]] int fd() const { return fd_.get(); }
  [[nodiscard]] bool direct() const { return direct_; }
  [[nodiscard]] const SegmentIdentity& identity() const { return identity_; }
  [[nodiscard]] const std::string& name() const { return name_; }
  // On the disk, as the file system counts.
  [[nodiscard]] std::uint64_t disk_bytes() const;

  // Forgets what is in it: a new epoch, and a new sequence for its age. Not synced: should the power fail
  // before the disk has it, the records of the old life are found again, and those that the new one has
  // written over have wrong checksums.
  Outcome begin_life(std::uint64_t sequence);
  // Writes the footer and syncs everything.
  [[nodiscard]] Outcome seal(const std::vector<RecordInfo>& records) const;

  struct Contents {
    bool sealed = false;
    std::vector<RecordInfo> records;
    std::uint64_t dropped = 0;  // records that were begun and not completed, or are damaged
  };
  // From the footer; where there is none, by reading the segment from its start and checking every payload.
  [[nodiscard]] Result<Contents> contents() const;

 private:
  SegmentFile(std::string name, UniqueFd fd, bool direct, SegmentIdentity identity)
      : name_(std::move(name)), fd_(std::move(fd)), direct_(direct), identity_(identity) {}
  [[nodiscard]] Result<Contents> scan() const;

  std::string name_;
  UniqueFd fd_;
  bool direct_ = false;
  SegmentIdentity identity_;
};

}  // namespace hicache::daemon
