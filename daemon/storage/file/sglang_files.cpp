#include "daemon/storage/file/sglang_files.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <string_view>
#include <utility>

#include "daemon/storage/file/segment_file.hpp"
#include "daemon/storage/file/sglang_order.hpp"
#include "shm/clock.hpp"
#include "shm/crash_points.hpp"

namespace hicache::daemon {
namespace {

constexpr const char* kTemporary = ".hicache-tmp.";
constexpr std::int64_t kOldNs =
    3'600'000'000'000;  // no write takes an hour: nobody's temporary file any more

Error os_error(const std::string& what, int error) {
  return Error{Status::system_error, what + ": " + std::strerror(error), error};
}

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

// "<64 digits>_<model>" and then rank or nothing.
bool page_file_of(const std::string& name, const std::string& model) {
  constexpr std::size_t kHash = 64;
  std::string part = "_" + model;
  std::replace(part.begin(), part.end(), '/', '-');
  return name.size() > kHash + part.size() && name.compare(kHash, part.size(), part) == 0 &&
         ends_with(name, ".bin");
}

std::int64_t ns_of(const timespec& t) {
  return t.tv_sec * std::int64_t{1'000'000'000} + t.tv_nsec;
}

// Whole blocks can bypass the page cache, whose copies would cost more than they bring.
int direct_flag(std::uint64_t bytes) {
  return bytes % kDiskBlock == 0 ? O_DIRECT : 0;
}

UniqueFd open_at(int directory, const std::string& name, int flags, std::uint64_t bytes) {
  constexpr int kAlways = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;  // a FIFO of that name must not hang anybody
  UniqueFd fd(::openat(directory, name.c_str(), flags | kAlways | direct_flag(bytes), 0666));
  if (!fd.valid() && errno == EINVAL)
    fd = UniqueFd(::openat(directory, name.c_str(), (flags | kAlways) & ~O_EXCL, 0666));
  return fd;
}

// Memory in the file's order, where that is not the pool's; kept by its thread.
std::span<std::byte> scratch(std::uint64_t bytes) {
  thread_local std::unique_ptr<AlignedBuffer> buffer;
  if (buffer == nullptr || buffer->bytes().size() < bytes) buffer = std::make_unique<AlignedBuffer>(bytes);
  return buffer->bytes().first(bytes);
}

Status failed(int& error, int with) {
  error = with;
  return with == ENOSPC || with == EDQUOT ? Status::no_space : Status::system_error;
}

}  // namespace

Result<std::unique_ptr<SglangFiles>> SglangFiles::open(const std::string& path, PageLayout layout) {
  if (::mkdir(path.c_str(), 0777) != 0 && errno != EEXIST) return os_error("directory " + path, errno);
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid()) return os_error("directory " + path, errno);
  std::unique_ptr<SglangFiles> files(new SglangFiles(path, std::move(fd), layout));
  const auto now = static_cast<std::int64_t>(unix_ns());
  for (const File& file : files->list("")) {
    if (file.name.find(kTemporary) != std::string::npos && now - file.used_ns > kOldNs)
      files->remove(file.name);
  }
  return files;
}

Status SglangFiles::look(const std::string& name, std::uint64_t bytes) const {
  struct stat info {};
  if (::fstatat(fd_.get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) return Status::not_found;
  if (!S_ISREG(info.st_mode) || static_cast<std::uint64_t>(info.st_size) != bytes) return Status::corrupt;
  return Status::ok;
}

Status SglangFiles::read(const std::string& name, const NamespaceSpec& spec, std::span<std::byte> pool,
                         int& error) const {
  const std::uint64_t bytes = spec.shard_bytes();
  const UniqueFd file = open_at(fd_.get(), name, O_RDONLY, bytes);
  if (!file.valid()) {
    if (errno == ENOENT) return Status::not_found;
    return errno == ELOOP ? Status::corrupt : failed(error, errno);
  }
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) return failed(error, errno);
  if (!S_ISREG(info.st_mode) || static_cast<std::uint64_t>(info.st_size) != bytes) return Status::corrupt;
  const bool convert = !same_order(layout_);
  const auto target = convert ? scratch(bytes) : pool.first(bytes);
  if (const int rc = read_at(file.get(), target, 0); rc != 0) {
    return rc == ENODATA ? Status::corrupt : failed(error, rc);  // it was cut meanwhile
  }
  if (convert) sglang_to_pool(spec, layout_, target, pool.first(bytes));
  return Status::ok;
}

Status SglangFiles::write(const std::string& name, const NamespaceSpec& spec, std::span<const std::byte> pool,
                          int& error) {
  static std::atomic<std::uint64_t> count{0};  // only has to differ
  const std::uint64_t bytes = spec.shard_bytes();
  const std::string temporary = name + kTemporary + std::to_string(::getpid()) + "." +
                                std::to_string(count.fetch_add(1, std::memory_order_relaxed));
  int rc = 0;
  {
    const UniqueFd file = open_at(fd_.get(), temporary, O_WRONLY | O_CREAT | O_EXCL, bytes);
    if (!file.valid()) return failed(error, errno);
    auto source = pool.first(bytes);
    if (!same_order(layout_)) {
      const auto flat = scratch(bytes);
      pool_to_sglang(spec, layout_, source, flat);
      source = flat;
    }
    rc = write_at(file.get(), source, 0);
    // Before the rename: a reader takes a file that is there for a whole one, also after a power failure.
    if (rc == 0 && ::fdatasync(file.get()) != 0) rc = errno;
  }
  HICACHE_CRASH_POINT(sglang_written);
  if (rc == 0 && ::renameat(fd_.get(), temporary.c_str(), fd_.get(), name.c_str()) != 0) rc = errno;
  HICACHE_CRASH_POINT(sglang_renamed);
  if (rc == 0) return Status::ok;
  ::unlinkat(fd_.get(), temporary.c_str(), 0);
  return failed(error, rc);
}

void SglangFiles::touch(const std::string& name) const {
  ::utimensat(fd_.get(), name.c_str(), nullptr, AT_SYMLINK_NOFOLLOW);
}

std::uint64_t SglangFiles::free_bytes() const {
  struct statvfs fs {};
  return ::fstatvfs(fd_.get(), &fs) == 0 ? std::uint64_t{fs.f_bavail} * fs.f_frsize : 0;
}

std::vector<SglangFiles::File> SglangFiles::list(const std::string& model) const {
  std::vector<File> files;
  const int copy = ::openat(fd_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* dir = copy < 0 ? nullptr : ::fdopendir(copy);
  if (dir == nullptr) {
    if (copy >= 0) ::close(copy);
    return files;
  }
  for (const dirent* entry = ::readdir(dir); entry != nullptr; entry = ::readdir(dir)) {
    File file{entry->d_name};
    struct stat info {};
    if (!model.empty() && !page_file_of(file.name, model)) continue;
    if (::fstatat(fd_.get(), file.name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) continue;
    if (!S_ISREG(info.st_mode)) continue;
    file.disk_bytes = static_cast<std::uint64_t>(info.st_blocks) * 512;
    file.used_ns = ns_of(info.st_mtim);
    files.push_back(std::move(file));
  }
  ::closedir(dir);
  return files;
}

void SglangFiles::remove(const std::string& name) const {
  ::unlinkat(fd_.get(), name.c_str(), 0);
}

std::string SglangFiles::note(const std::string& name) const {
  const UniqueFd file = open_at(fd_.get(), name, O_RDONLY, 1);
  char text[256];
  const ssize_t n = file.valid() ? ::read(file.get(), text, sizeof text) : 0;
  return n > 0 ? std::string(text, static_cast<std::size_t>(n)) : "";
}

Outcome SglangFiles::set_note(const std::string& name, const std::string& text) const {
  const std::string temporary = name + kTemporary + std::to_string(::getpid());
  const UniqueFd file = open_at(fd_.get(), temporary, O_WRONLY | O_CREAT | O_TRUNC, 1);
  if (!file.valid() || write_at(file.get(), std::as_bytes(std::span(text)), 0) != 0 ||
      ::fdatasync(file.get()) != 0 ||
      ::renameat(fd_.get(), temporary.c_str(), fd_.get(), name.c_str()) != 0) {
    return os_error(path_ + "/" + name, errno);
  }
  return success();
}

}  // namespace hicache::daemon
