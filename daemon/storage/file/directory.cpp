#include "daemon/storage/file/directory.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <utility>

#include "daemon/storage/file/disk_format.hpp"
#include "shm/clock.hpp"

namespace hicache::daemon {
namespace {

constexpr const char* kSuperblock = "superblock.hicache";
constexpr const char* kLock = "lock.hicache";
constexpr const char* kProbe = "probe.hicache.new";
constexpr std::string_view kPrefix = "segment-";
constexpr std::string_view kSuffix = ".hicache";
constexpr std::string_view kUnfinished = ".hicache.new";
constexpr std::size_t kDigits = 16;

Error os_error(const std::string& what, int error) {
  return Error{Status::system_error, what + ": " + std::strerror(error), error};
}

bool write_all(int fd, std::span<const std::byte> bytes) {
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t n = ::write(fd, bytes.data() + done, bytes.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    done += static_cast<std::size_t>(n);
  }
  return true;
}

// Who holds the lock, from the lock file's text; for people only.
std::string holder(int lock) {
  std::array<char, 32> text{};
  const ssize_t n = ::pread(lock, text.data(), text.size() - 1, 0);
  int pid = 0;
  if (n > 0) std::from_chars(text.data(), text.data() + n, pid);
  return pid > 0 ? "process " + std::to_string(pid) : "another process";
}

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

}  // namespace

std::string segment_name(std::uint64_t sequence) {
  char text[64];
  std::snprintf(text, sizeof text, "segment-%016llx.hicache", static_cast<unsigned long long>(sequence));
  return text;
}

std::uint64_t segment_number(const std::string& name) {
  if (name.size() != kPrefix.size() + kDigits + kSuffix.size()) return 0;
  if (name.compare(0, kPrefix.size(), kPrefix) != 0 || !ends_with(name, kSuffix)) return 0;
  const char* digits = name.data() + kPrefix.size();
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(digits, digits + kDigits, number, 16);
  return error == std::errc() && end == digits + kDigits ? number : 0;
}

Result<std::unique_ptr<Directory>> Directory::open(const std::string& path) {
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return os_error("directory " + path, errno);
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid()) return os_error("directory " + path, errno);
  UniqueFd lock(::openat(fd.get(), kLock, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock.valid()) return os_error("lock file of " + path, errno);
  if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return os_error("lock of " + path, errno);
    return Error{Status::busy, "directory " + path + " is in use by " + holder(lock.get()), 0};
  }
  const std::string pid = std::to_string(::getpid()) + "\n";
  // Only for the message above: a full disk must not keep anybody from reading what is there.
  if (::ftruncate(lock.get(), 0) == 0) (void)!::pwrite(lock.get(), pid.data(), pid.size(), 0);
  std::unique_ptr<Directory> directory(new Directory(path, std::move(fd), std::move(lock)));
  if (Outcome checked = directory->check_or_make_superblock(); !checked) return checked.error();
  return directory;
}

Outcome Directory::check_or_make_superblock() const {
  alignas(8) std::array<std::byte, kDiskBlock> block{};
  const UniqueFd old(::openat(fd_.get(), kSuperblock, O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (old.valid()) {
    const ssize_t n = ::pread(old.get(), block.data(), block.size(), 0);
    if (n < 0) return os_error("superblock of " + path_, errno);
    const Outcome good = check_superblock(std::span(block).first(static_cast<std::size_t>(n)));
    if (good) return good;
    return Error{good.status(),
                 "superblock of " + path_ + ": " + good.error().message +
                     "; name another directory, or remove the *.hicache files of this one to start afresh",
                 0};
  }
  if (errno != ENOENT) return os_error("superblock of " + path_, errno);
  // Complete under another name first: a superblock is whole or not there.
  const std::string name = std::string(kSuperblock) + ".new";
  make_superblock(block, unix_ns());
  const UniqueFd made(
      ::openat(fd_.get(), name.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!made.valid() || !write_all(made.get(), block) || ::fsync(made.get()) != 0 ||
      ::renameat(fd_.get(), name.c_str(), fd_.get(), kSuperblock) != 0 || ::fsync(fd_.get()) != 0) {
    return os_error("superblock of " + path_, errno);
  }
  return success();
}

Result<std::uint64_t> Directory::free_bytes() const {
  struct statvfs fs {};
  if (::fstatvfs(fd_.get(), &fs) != 0) return os_error("statvfs of " + path_, errno);
  return std::uint64_t{fs.f_bavail} * fs.f_frsize;
}

Result<std::vector<std::string>> Directory::segment_names() const {
  const int copy = ::openat(fd_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* dir = copy < 0 ? nullptr : ::fdopendir(copy);
  if (dir == nullptr) {
    const int error = errno;
    if (copy >= 0) ::close(copy);
    return os_error("directory " + path_, error);
  }
  std::vector<std::string> names;
  std::vector<std::string> unfinished;
  for (const dirent* entry = ::readdir(dir); entry != nullptr; entry = ::readdir(dir)) {
    std::string name = entry->d_name;
    if (segment_number(name) != 0)
      names.push_back(std::move(name));
    else if (ends_with(name, kUnfinished))
      unfinished.push_back(std::move(name));
  }
  ::closedir(dir);
  for (const std::string& name : unfinished) ::unlinkat(fd_.get(), name.c_str(), 0);
  return names;
}

bool Directory::present() const {
  struct stat open {};
  struct stat named {};
  return ::fstat(fd_.get(), &open) == 0 && ::stat(path_.c_str(), &named) == 0 &&
         open.st_dev == named.st_dev && open.st_ino == named.st_ino;
}

int Directory::try_write() const {
  const std::array<std::byte, kDiskBlock> block{};
  const UniqueFd file(
      ::openat(fd_.get(), kProbe, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file.valid()) return errno;
  const int error = write_all(file.get(), block) && ::fdatasync(file.get()) == 0 ? 0 : errno;
  ::unlinkat(fd_.get(), kProbe, 0);
  return error;
}

}  // namespace hicache::daemon
