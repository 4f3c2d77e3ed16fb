#include "tools/dump/region_source.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "shm/region.hpp"

namespace hicache::inspect {
namespace {

Error open_error(const std::string& what, int code) {
  Status status = Status::system_error;
  if (code == ENOENT) status = Status::not_found;
  if (code == EACCES || code == EPERM) status = Status::not_permitted;
  return Error{status, "cannot open " + what + ": " + std::strerror(code), code};
}

}  // namespace

Result<FileSource> FileSource::checked(UniqueFd fd, bool may_change, const std::string& what) {
  if (!fd.valid()) return open_error(what, errno);
  struct stat st {};
  if (::fstat(fd.get(), &st) != 0) return open_error(what, errno);
  if (!S_ISREG(st.st_mode))
    return Error{Status::corrupt, what + " is not a regular file or shared memory object", 0};
  return FileSource(std::move(fd), may_change);
}

Result<FileSource> FileSource::open_region(const std::string& name) {
  if (!valid_region_name(name)) {
    return Error{Status::invalid_argument,
                 "region name must be 1 to 48 letters, digits, '.', '_' or '-', not starting with a dot", 0};
  }
  const std::string object = control_object_name(name);
  // O_NONBLOCK: somebody else's FIFO under this name must not make the tool wait for a writer.
  return checked(UniqueFd(::shm_open(("/" + object).c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC, 0)), true,
                 "shared memory " + object);
}

Result<FileSource> FileSource::open_file(const std::string& path) {
  return checked(UniqueFd(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC)), false, path);
}

std::uint64_t FileSource::size() const {
  struct stat st {};
  return ::fstat(fd_.get(), &st) == 0 ? static_cast<std::uint64_t>(st.st_size) : 0;
}

std::size_t FileSource::read(std::uint64_t offset, std::span<std::uint8_t> out) {
  std::size_t done = 0;
  while (done < out.size()) {
    const ssize_t n =
        ::pread(fd_.get(), out.data() + done, out.size() - done, static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    done += static_cast<std::size_t>(n);
  }
  return done;
}

std::size_t MemorySource::read(std::uint64_t offset, std::span<std::uint8_t> out) {
  if (out.empty() || offset >= bytes_.size()) return 0;
  const std::size_t n = std::min<std::uint64_t>(out.size(), bytes_.size() - offset);
  std::memcpy(out.data(), bytes_.data() + offset, n);
  return n;
}

}  // namespace hicache::inspect
