#include "daemon/storage/file/segment_file.hpp"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "daemon/integrity/payload_checksum.hpp"
#include "shm/crash_points.hpp"

namespace hicache::daemon {
namespace {

constexpr std::uint64_t kScanBytes = 4 * kMiB;

Error file_error(const Directory& directory, const std::string& name, int error) {
  return Error{error == ENOSPC || error == EDQUOT ? Status::no_space : Status::system_error,
               directory.path() + "/" + name + ": " + std::strerror(error), error};
}

// Opens for O_DIRECT where the file system can do it with blocks of 4 KiB.
UniqueFd open_file(const Directory& directory, const std::string& name, int flags, bool& direct) {
  constexpr int kAlways = O_RDWR | O_CLOEXEC | O_NOFOLLOW;
  UniqueFd fd(::openat(directory.fd(), name.c_str(), kAlways | flags | O_DIRECT, 0600));
  direct = fd.valid();
  if (!direct && errno == EINVAL) {
    fd = UniqueFd(::openat(directory.fd(), name.c_str(), kAlways | (flags & ~O_EXCL), 0600));
  }
#ifdef STATX_DIOALIGN
  struct statx info {};
  if (direct && ::statx(fd.get(), "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 &&
      (info.stx_mask & STATX_DIOALIGN) != 0 &&
      (info.stx_dio_offset_align > kDiskBlock || info.stx_dio_mem_align > kDiskBlock)) {
    ::fcntl(fd.get(), F_SETFL, 0);  // takes O_DIRECT away
    direct = false;
  }
#endif
  return fd;
}

// Never 0, and not to be guessed by who fills pages.
Result<std::uint64_t> random_epoch() {
  std::uint64_t epoch = 0;
  if (::getrandom(&epoch, sizeof epoch, 0) != static_cast<ssize_t>(sizeof epoch)) {
    return Error{Status::system_error, "getrandom: " + std::string(std::strerror(errno)), errno};
  }
  return epoch | 1;
}

// Reads a segment from its start to its end, in order, through one buffer.
class Scanner {
 public:
  Scanner(int fd, std::uint64_t end) : fd_(fd), end_(end), buffer_(kScanBytes) {}

  // The bytes at `offset`, at most `most` of them and at least one block, valid until the next call. Empty
  // when they can't be read.
  std::span<const std::byte> at(std::uint64_t offset, std::uint64_t most) {
    if (offset >= end_) return {};
    if (offset < from_ || offset >= from_ + filled_) {
      from_ = offset;
      filled_ = std::min(kScanBytes, end_ - offset);
      if (read_at(fd_, buffer_.bytes().first(filled_), offset) != 0) filled_ = 0;
    }
    const std::uint64_t skipped = offset - from_;
    if (skipped >= filled_) return {};
    return buffer_.bytes().subspan(skipped, std::min(most, filled_ - skipped));
  }

  // The checksum of a record's payload, or nothing when it can't be read.
  std::optional<std::uint64_t> checksum(const RecordInfo& record) {
    // Shards are gathered without their padding: a page in memory, at most once at a time.
    std::vector<std::byte> payload;
    payload.reserve(record.shape.shards * record.shape.shard_bytes);
    for (std::uint32_t shard = 0; shard < record.shape.shards; ++shard) {
      const std::uint64_t start = record.offset + kDiskBlock + shard * record.shape.shard_stride();
      for (std::uint64_t done = 0; done < record.shape.shard_bytes;) {
        const auto bytes = at(start + done, record.shape.shard_bytes - done);
        if (bytes.empty()) return std::nullopt;
        payload.insert(payload.end(), bytes.begin(), bytes.end());
        done += bytes.size();
      }
    }
    return payload_checksum(payload);
  }

 private:
  int fd_;
  std::uint64_t end_;
  std::uint64_t from_ = 0;
  std::uint64_t filled_ = 0;
  AlignedBuffer buffer_;
};

}  // namespace

AlignedBuffer::AlignedBuffer(std::size_t bytes) : size_(align_up(bytes, kDiskBlock)) {
  data_ = static_cast<std::byte*>(std::aligned_alloc(kDiskBlock, size_));
  if (data_ == nullptr) throw std::bad_alloc();
}
AlignedBuffer::AlignedBuffer(AlignedBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
AlignedBuffer::~AlignedBuffer() {
  std::free(data_);
}

int read_at(int fd, std::span<std::byte> bytes, std::uint64_t offset) {
  while (!bytes.empty()) {
    const ssize_t n = ::pread(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : ENODATA;
    bytes = bytes.subspan(static_cast<std::size_t>(n));
    offset += static_cast<std::uint64_t>(n);
  }
  return 0;
}

int write_at(int fd, std::span<const std::byte> bytes, std::uint64_t offset) {
  while (!bytes.empty()) {
    const ssize_t n = ::pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : ENOSPC;
    bytes = bytes.subspan(static_cast<std::size_t>(n));
    offset += static_cast<std::uint64_t>(n);
  }
  return 0;
}

Result<std::unique_ptr<SegmentFile>> SegmentFile::create(const Directory& directory, std::uint64_t sequence,
                                                         std::uint64_t bytes) {
  const std::string name = segment_name(sequence);
  const std::string unfinished = name + ".new";
  bool direct = false;
  UniqueFd fd = open_file(directory, unfinished, O_CREAT | O_EXCL, direct);
  if (!fd.valid()) return file_error(directory, name, errno);
  int error = ::fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  // A file system that can't promise blocks says so when they are written.
  if (error == EOPNOTSUPP) error = ::ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  std::unique_ptr<SegmentFile> file;
  Outcome begun = success();
  if (error == 0) {
    file.reset(new SegmentFile(name, std::move(fd), direct, SegmentIdentity{0, 0, bytes}));
    begun = file->begin_life(sequence);
    HICACHE_CRASH_POINT(segment_made);
    if (begun && ::renameat(directory.fd(), unfinished.c_str(), directory.fd(), name.c_str()) != 0)
      error = errno;
  }
  if (error == 0 && begun) return file;
  ::unlinkat(directory.fd(), unfinished.c_str(), 0);
  return error != 0 ? file_error(directory, name, error) : begun.error();
}

Result<std::unique_ptr<SegmentFile>> SegmentFile::open(const Directory& directory, const std::string& name) {
  bool direct = false;
  UniqueFd fd = open_file(directory, name, 0, direct);
  if (!fd.valid()) return file_error(directory, name, errno);
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return file_error(directory, name, errno);
  const AlignedBuffer block(kDiskBlock);
  const int error = S_ISREG(info.st_mode) ? read_at(fd.get(), block.bytes(), 0) : ENODATA;
  if (error != 0 && error != ENODATA) return file_error(directory, name, error);
  const auto identity = error == 0 ? check_segment_header(block.bytes()) : std::nullopt;
  if (!identity) {
    return Error{Status::corrupt, directory.path() + "/" + name + ": does not begin as a segment", 0};
  }
  if (static_cast<std::uint64_t>(info.st_size) < identity->bytes) {
    return Error{Status::corrupt,
                 directory.path() + "/" + name + ": has " + std::to_string(info.st_size) + " of " +
                     std::to_string(identity->bytes) + " bytes",
                 0};
  }
  return std::unique_ptr<SegmentFile>(new SegmentFile(name, std::move(fd), direct, *identity));
}

void SegmentFile::remove(const Directory& directory, const std::string& name) {
  ::unlinkat(directory.fd(), name.c_str(), 0);
}

std::uint64_t SegmentFile::disk_bytes() const {
  struct stat info {};
  return ::fstat(fd_.get(), &info) == 0 ? static_cast<std::uint64_t>(info.st_blocks) * 512 : 0;
}

Outcome SegmentFile::begin_life(std::uint64_t sequence) {
  const auto epoch = random_epoch();
  if (!epoch) return epoch.error();
  identity_.epoch = *epoch;
  identity_.sequence = sequence;
  const AlignedBuffer block(kDiskBlock);
  make_segment_header(block.bytes(), identity_);
  const int error = write_at(fd_.get(), block.bytes(), 0);
  if (error == 0) return success();
  return Error{error == ENOSPC ? Status::no_space : Status::system_error, name_ + ": " + std::strerror(error),
               error};
}

Outcome SegmentFile::seal(const std::vector<RecordInfo>& records) const {
  const std::uint64_t bytes = footer_bytes(records.size());
  const AlignedBuffer blocks(bytes + kDiskBlock);
  const auto footer = blocks.bytes().first(bytes);
  make_footer(footer, records);
  make_trailer(blocks.bytes().subspan(bytes), identity_, records.size(), footer);
  int error = write_at(fd_.get(), blocks.bytes(), identity_.bytes - kDiskBlock - bytes);
  HICACHE_CRASH_POINT(segment_footer_written);
  if (error == 0 && ::fdatasync(fd_.get()) != 0) error = errno;
  if (error == 0) return success();
  return Error{Status::system_error, name_ + ": " + std::strerror(error), error};
}

Result<SegmentFile::Contents> SegmentFile::contents() const {
  const AlignedBuffer block(kDiskBlock);
  if (read_at(fd_.get(), block.bytes(), identity_.bytes - kDiskBlock) == 0) {
    if (const auto trailer = check_trailer(block.bytes(), identity_)) {
      const std::uint64_t bytes = footer_bytes(trailer->records);
      const AlignedBuffer footer(std::max(bytes, kDiskBlock));
      if (read_at(fd_.get(), footer.bytes().first(bytes), trailer->footer_offset) == 0) {
        auto records = check_footer(footer.bytes().first(bytes), *trailer);
        if (records) return Contents{true, std::move(*records), 0};
      }
    }
  }
  return scan();
}

Result<SegmentFile::Contents> SegmentFile::scan() const {
  Contents found;
  Scanner scanner(fd_.get(), identity_.bytes);
  for (std::uint64_t offset = kDiskBlock; offset < identity_.bytes;) {
    const auto block = scanner.at(offset, kDiskBlock);
    if (block.empty()) {  // can't be read: on to the next stretch
      offset += kScanBytes;
      continue;
    }
    const auto record = check_record_header(block, identity_.epoch, offset);
    // Not a header: the place of a record whose header never arrived, or the end. The next may be anywhere.
    if (!record || record->shape.record_bytes() > identity_.bytes - offset) {
      offset += kDiskBlock;
      continue;
    }
    if (scanner.checksum(*record) == record->payload_checksum) {
      found.records.push_back(*record);
    } else {
      ++found.dropped;
    }
    offset += record->shape.record_bytes();
  }
  return found;
}

}  // namespace hicache::daemon
