#include "shm/shared_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <boost/interprocess/exceptions.hpp>
#include <boost/interprocess/permissions.hpp>
#include <boost/interprocess/shared_memory_object.hpp>
#include <cerrno>
#include <cstring>
#include <utility>

namespace hicache {
namespace bip = boost::interprocess;

namespace {

Error os_error(Status status, const std::string& what, int code) {
  return Error{status, what + ": " + std::strerror(code), code};
}

// posix_fallocate restarts from the beginning after a signal, and returns the error instead of setting errno.
int reserve(int fd, std::uint64_t bytes) {
  int rc = 0;
  do rc = ::posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  while (rc == EINTR);
  return rc;
}

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

}  // namespace

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  if (this != &other) {
    if (data_ != nullptr) ::munmap(data_, size_);
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

Result<Mapping> Mapping::map(int fd, std::uint64_t bytes, Access access, bool dont_fork) {
  const int protection = access == Access::read_only ? PROT_READ : PROT_READ | PROT_WRITE;
  void* data = ::mmap(nullptr, bytes, protection, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    return os_error(Status::system_error, "cannot map " + std::to_string(bytes) + " bytes", errno);
  }
  Mapping m;
  m.data_ = data;
  m.size_ = bytes;
  if (dont_fork && ::madvise(data, bytes, MADV_DONTFORK) != 0) {
    return os_error(Status::system_error, "madvise(MADV_DONTFORK)", errno);
  }
  return m;
}

Result<UniqueFd> create_named(const std::string& name, std::uint64_t bytes,
                              const std::function<Outcome(int fd)>& fill) {
  try {
    bip::permissions mode(0600);
    bip::shared_memory_object object(bip::create_only, name.c_str(), bip::read_write, mode);
    UniqueFd fd(::fcntl(object.get_mapping_handle().handle, F_DUPFD_CLOEXEC, 0));
    if (!fd.valid()) return os_error(Status::system_error, "cannot keep shared memory " + name, errno);
    if (Outcome filled = fill ? fill(fd.get()) : success(); !filled) {
      bip::shared_memory_object::remove(name.c_str());
      return filled.error();
    }
    if (const int rc = reserve(fd.get(), bytes); rc != 0) {
      bip::shared_memory_object::remove(name.c_str());
      return os_error(rc == ENOSPC || rc == ENOMEM ? Status::no_space : Status::system_error,
                      "cannot reserve " + std::to_string(bytes) + " bytes of shared memory for " + name, rc);
    }
    return fd;
  } catch (const bip::interprocess_exception& e) {
    const bool taken = e.get_error_code() == bip::already_exists_error;
    return os_error(taken ? Status::exists : Status::system_error, "cannot create shared memory " + name,
                    e.get_native_error());
  }
}

Result<UniqueFd> open_named(const std::string& name, Mapping::Access access) {
  try {
    const auto mode = access == Mapping::Access::read_only ? bip::read_only : bip::read_write;
    bip::shared_memory_object object(bip::open_only, name.c_str(), mode);
    UniqueFd fd(::fcntl(object.get_mapping_handle().handle, F_DUPFD_CLOEXEC, 0));
    if (!fd.valid()) return os_error(Status::system_error, "cannot keep shared memory " + name, errno);
    return fd;
  } catch (const bip::interprocess_exception& e) {
    const bool missing = e.get_error_code() == bip::not_found_error;
    return os_error(missing ? Status::not_found : Status::system_error, "cannot open shared memory " + name,
                    e.get_native_error());
  }
}

void remove_named(const std::string& name) {
  bip::shared_memory_object::remove(name.c_str());
}

Result<UniqueFd> reopen_read_only(int fd) {
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  UniqueFd out(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!out.valid()) return os_error(Status::system_error, "cannot reopen read-only", errno);
  return out;
}

Result<UniqueFd> create_sealed(const std::string& label, std::uint64_t bytes) {
  UniqueFd fd(::memfd_create(label.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return os_error(Status::system_error, "memfd_create", errno);
  if (const int rc = reserve(fd.get(), bytes); rc != 0) {
    return os_error(rc == ENOSPC || rc == ENOMEM ? Status::no_space : Status::system_error,
                    "cannot reserve " + std::to_string(bytes) + " bytes for " + label, rc);
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0)
    return os_error(Status::system_error, "F_ADD_SEALS", errno);
  return fd;
}

Result<std::uint64_t> sealed_size(int fd) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0) return Error{Status::not_permitted, "descriptor is not a memfd: it can't be sealed", errno};
  if ((seals & kSeals) != kSeals) {
    return Error{Status::not_permitted, "memfd is not sealed against shrinking, growing and unsealing", 0};
  }
  return object_size(fd);
}

Result<std::uint64_t> object_size(int fd) {
  struct stat st {};
  if (::fstat(fd, &st) != 0) return os_error(Status::system_error, "fstat", errno);
  return static_cast<std::uint64_t>(st.st_size);
}

}  // namespace hicache
