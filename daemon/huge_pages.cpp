#include "daemon/huge_pages.hpp"

#include <spdlog/fmt/fmt.h>
#include <spdlog/spdlog.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <utility>

#include "daemon/config_keys.hpp"
#include "shm/shared_memory.hpp"
#include "shm/types.hpp"

namespace hicache::daemon {
namespace {

constexpr std::uint64_t kHugeBytes = 2 * kMiB;
constexpr const char* kPolicyFile = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

// Maps the object at a multiple of the huge page's size: otherwise its pages can't be mapped as huge ones.
class AlignedMapping {
 public:
  AlignedMapping(int fd, std::uint64_t bytes) : bytes_(bytes) {
    room_ =
        ::mmap(nullptr, bytes + kHugeBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room_ == MAP_FAILED) return;
    auto* at = reinterpret_cast<std::uint8_t*>(align_up(reinterpret_cast<std::uintptr_t>(room_), kHugeBytes));
    if (::mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == at) data_ = at;
  }
  ~AlignedMapping() {
    if (room_ != MAP_FAILED) ::munmap(room_, bytes_ + kHugeBytes);
  }
  AlignedMapping(const AlignedMapping&) = delete;
  AlignedMapping& operator=(const AlignedMapping&) = delete;
  [[nodiscard]] std::uint8_t* data() const { return data_; }

 private:
  void* room_ = MAP_FAILED;
  std::uint8_t* data_ = nullptr;
  std::uint64_t bytes_;
};

// Bytes of the mapping at `data` that are mapped with huge pages.
std::uint64_t huge_bytes_at(const std::uint8_t* data) {
  std::ostringstream begin;
  begin << std::hex << reinterpret_cast<std::uintptr_t>(data) << '-';
  std::ifstream maps("/proc/self/smaps");
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    if (line.find('-') < line.find(' ') && line.find(':') > line.find(' ')) {
      inside = line.rfind(begin.str(), 0) == 0;
    } else if (inside && line.rfind("ShmemPmdMapped:", 0) == 0) {
      return std::stoull(line.substr(line.find(':') + 1)) * kKiB;
    }
  }
  return 0;
}

Outcome fill(int fd, std::uint64_t bytes, std::uint64_t& huge) {
  if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0)
    return Error{Status::system_error, std::string("ftruncate: ") + std::strerror(errno), errno};
  const AlignedMapping mapping(fd, bytes);
  if (mapping.data() == nullptr)
    return Error{Status::system_error, std::string("mmap: ") + std::strerror(errno), errno};
  if (::madvise(mapping.data(), bytes, MADV_HUGEPAGE) != 0)
    return Error{Status::not_permitted, std::string("madvise(MADV_HUGEPAGE): ") + std::strerror(errno),
                 errno};
  // In whole huge pages, and no further than they reach: small pages are reserved faster in another way.
  const std::uint64_t end = bytes / kHugeBytes * kHugeBytes;
  for (std::uint64_t at = 0; at < end; at += kHugeBytes) {
    if (::madvise(mapping.data() + at, kHugeBytes, MADV_POPULATE_WRITE) != 0) {
      const Status status =
          errno == ENOMEM || errno == EFAULT || errno == ENOSPC ? Status::no_space : Status::system_error;
      return Error{status, std::string("madvise(MADV_POPULATE_WRITE): ") + std::strerror(errno), errno};
    }
    if (at == 0 && huge_bytes_at(mapping.data()) == 0) break;
  }
  huge = huge_bytes_at(mapping.data());
  return success();
}

}  // namespace

std::string shmem_huge_policy() {
  std::ifstream file(kPolicyFile);
  std::string line;
  return std::getline(file, line) ? line : "unknown";
}

Outcome fill_with_huge_pages(int fd, std::uint64_t bytes, HugePages wanted) {
  if (wanted == HugePages::off) return success();
  std::uint64_t huge = 0;
  const Outcome filled = fill(fd, bytes, huge);
  const std::uint64_t whole = bytes / kHugeBytes * kHugeBytes;
  if (filled && huge >= whole) {
    spdlog::info("pool: {} in huge pages", format_bytes(huge));
    return success();
  }
  const std::string text = fmt::format(
      "{} of the pool's {} are in huge pages{}{}; /dev/shm must be mounted with huge=advise, within_size or "
      "always, {} says \"{}\" (anything but deny), and enough memory must be free in pieces of 2 MiB",
      format_bytes(huge), format_bytes(bytes), filled ? "" : ": ", filled ? "" : filled.error().message,
      kPolicyFile, shmem_huge_policy());
  if (wanted == HugePages::require) {
    return Error{
        filled ? Status::no_space : filled.status(),
        "pool.huge_pages is \"require\", but " + text + ": allow them, or set pool.huge_pages to \"prefer\"",
        0};
  }
  spdlog::warn("{}", text);
  return success();
}

}  // namespace hicache::daemon
