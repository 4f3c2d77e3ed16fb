// Loaded into a daemon before libc (LD_PRELOAD): while the file that HICACHE_TEST_STALL names exists, reads
// and writes at an offset of a regular file wait, as they do on a disk that does not answer. Everything above
// them is the real daemon on a real file system.
#include <dlfcn.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <cstdlib>

namespace {

void wait_for_disk(int fd) {
  static const char* const stalled = ::getenv("HICACHE_TEST_STALL");
  if (stalled == nullptr) return;
  struct stat s {};
  if (::fstat(fd, &s) != 0 || !S_ISREG(s.st_mode)) return;
  const timespec nap{0, 1'000'000};
  while (::access(stalled, F_OK) == 0) ::nanosleep(&nap, nullptr);
}

template <class Call>
Call* real(const char* name) {
  return reinterpret_cast<Call*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

// The 64-bit names are what a program built with _FILE_OFFSET_BITS=64 calls.
#define HICACHE_STALLED(name, Buffer, Count)                                                         \
  extern "C" __attribute__((visibility("default"))) ssize_t name(int fd, Buffer buffer, Count count, \
                                                                 off_t offset) {                     \
    static const auto call = real<decltype(name)>(#name);                                            \
    wait_for_disk(fd);                                                                               \
    return call(fd, buffer, count, offset);                                                          \
  }
HICACHE_STALLED(pread, void*, size_t)
HICACHE_STALLED(pwrite, const void*, size_t)
HICACHE_STALLED(preadv, const iovec*, int)
HICACHE_STALLED(pwritev, const iovec*, int)
HICACHE_STALLED(pread64, void*, size_t)
HICACHE_STALLED(pwrite64, const void*, size_t)
HICACHE_STALLED(preadv64, const iovec*, int)
HICACHE_STALLED(pwritev64, const iovec*, int)
