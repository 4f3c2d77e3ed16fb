// Named shared memory that can't raise SIGBUS later, and sealed memfds that a peer can't pull away.
#include "shm/shared_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include "tests/support/catch.hpp"

namespace hicache {

namespace {

constexpr std::uint64_t kBytes = 1 << 20;

// A name of this test process that goes when the test does.
struct Name {
  Name() { remove_named(text); }
  ~Name() { remove_named(text); }
  Name(const Name&) = delete;
  Name& operator=(const Name&) = delete;
  std::string text = "hicache.unit-test-" + std::to_string(::getpid()) + ".control";
};

struct stat status_of(int fd) {
  struct stat st {};
  REQUIRE(::fstat(fd, &st) == 0);
  return st;
}

UniqueFd memfd(int seals) {
  UniqueFd fd(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(fd.valid());
  REQUIRE(::ftruncate(fd.get(), kBytes) == 0);
  if (seals != 0) REQUIRE(::fcntl(fd.get(), F_ADD_SEALS, seals) == 0);
  return fd;
}

}  // namespace

TEST_CASE("A named object has its size, its memory reserved and mode 0600") {
  const Name name;
  const ::mode_t before = ::umask(0);
  const auto fd = create_named(name.text, kBytes);
  ::umask(before);
  REQUIRE(fd.ok());
  const struct stat st = status_of(fd->get());
  CHECK(st.st_size == static_cast<off_t>(kBytes));
  CHECK(static_cast<std::uint64_t>(st.st_blocks) * 512 >= kBytes);
  CHECK((st.st_mode & 0777) == 0600);
  CHECK(object_size(fd->get()).value() == kBytes);
  CHECK((::fcntl(fd->get(), F_GETFD) & FD_CLOEXEC) != 0);
}

TEST_CASE("A name that is taken is refused and left alone") {
  const Name name;
  const auto first = create_named(name.text, kBytes);
  REQUIRE(first.ok());
  CHECK(create_named(name.text, 4096).status() == Status::exists);
  const auto opened = open_named(name.text, Mapping::Access::read_only);
  REQUIRE(opened.ok());
  CHECK(object_size(opened->get()).value() == kBytes);
}

TEST_CASE("An object larger than /dev/shm is refused with no_space and leaves no name behind") {
  struct statvfs fs {};
  REQUIRE(::statvfs("/dev/shm", &fs) == 0);
  if (fs.f_blocks == 0) {
    WARN("/dev/shm has no limit here: nothing is too large for it");
    return;
  }
  const Name name;
  const std::uint64_t too_large = (static_cast<std::uint64_t>(fs.f_blocks) + 1) * fs.f_frsize;
  const auto refused = create_named(name.text, too_large);
  REQUIRE(refused.status() == Status::no_space);
  CHECK(refused.error().message.find(std::to_string(too_large)) != std::string::npos);
  CHECK(refused.error().system_errno == ENOSPC);
  CHECK(open_named(name.text, Mapping::Access::read_only).status() == Status::not_found);
  CHECK(create_named(name.text, kBytes).ok());
}

TEST_CASE("A missing name is not_found, and removing it is fine") {
  const Name name;
  CHECK(open_named(name.text, Mapping::Access::read_write).status() == Status::not_found);
  remove_named(name.text);
}

TEST_CASE("A removed object lives on in its descriptors and mappings") {
  const Name name;
  const auto fd = create_named(name.text, kBytes);
  REQUIRE(fd.ok());
  auto mapping = Mapping::map(fd->get(), kBytes, Mapping::Access::read_write);
  REQUIRE(mapping.ok());
  remove_named(name.text);
  std::memset(mapping->data(), 7, kBytes);
  CHECK(static_cast<std::uint8_t*>(mapping->data())[kBytes - 1] == 7);
}

TEST_CASE("A read-only descriptor can't be mapped for writing and sees what the writer writes") {
  const Name name;
  const auto fd = create_named(name.text, kBytes);
  REQUIRE(fd.ok());
  const auto reader = reopen_read_only(fd->get());
  REQUIRE(reader.ok());
  CHECK(Mapping::map(reader->get(), kBytes, Mapping::Access::read_write).status() == Status::system_error);
  const auto read_mapping = Mapping::map(reader->get(), kBytes, Mapping::Access::read_only);
  const auto write_mapping = Mapping::map(fd->get(), kBytes, Mapping::Access::read_write);
  REQUIRE(read_mapping.ok());
  REQUIRE(write_mapping.ok());
  static_cast<std::uint8_t*>(write_mapping->data())[123] = 45;
  CHECK(static_cast<const std::uint8_t*>(read_mapping->data())[123] == 45);
}

TEST_CASE("A sealed memfd keeps its size for ever") {
  const auto fd = create_sealed("test", kBytes);
  REQUIRE(fd.ok());
  CHECK(sealed_size(fd->get()).value() == kBytes);
  CHECK(static_cast<std::uint64_t>(status_of(fd->get()).st_blocks) * 512 >= kBytes);
  CHECK(::ftruncate(fd->get(), 0) == -1);
  CHECK(errno == EPERM);
  CHECK(::ftruncate(fd->get(), 2 * kBytes) == -1);
  CHECK(errno == EPERM);
  CHECK(::fcntl(fd->get(), F_ADD_SEALS, F_SEAL_WRITE) == -1);
  CHECK(object_size(fd->get()).value() == kBytes);
  auto mapping = Mapping::map(fd->get(), kBytes, Mapping::Access::read_write);
  REQUIRE(mapping.ok());
  std::memset(mapping->data(), 1, kBytes);
}

TEST_CASE("Descriptors that a peer could truncate are refused") {
  SECTION("no seals") {
    CHECK(sealed_size(memfd(0).get()).status() == Status::not_permitted);
  }
  SECTION("may shrink") {
    CHECK(sealed_size(memfd(F_SEAL_GROW | F_SEAL_SEAL).get()).status() == Status::not_permitted);
  }
  SECTION("may grow") {
    CHECK(sealed_size(memfd(F_SEAL_SHRINK | F_SEAL_SEAL).get()).status() == Status::not_permitted);
  }
  SECTION("may get more seals") {
    CHECK(sealed_size(memfd(F_SEAL_SHRINK | F_SEAL_GROW).get()).status() == Status::not_permitted);
  }
  SECTION("a memfd that can't be sealed") {
    const UniqueFd fd(::memfd_create("test", MFD_CLOEXEC));
    CHECK(sealed_size(fd.get()).status() == Status::not_permitted);
  }
  SECTION("a regular file") {
    char path[] = "/tmp/hicache-unit-test-XXXXXX";
    const UniqueFd fd(::mkstemp(path));
    REQUIRE(fd.valid());
    ::unlink(path);
    CHECK(sealed_size(fd.get()).status() == Status::not_permitted);
  }
  SECTION("named shared memory") {
    const Name name;
    const auto fd = create_named(name.text, kBytes);
    REQUIRE(fd.ok());
    CHECK(sealed_size(fd->get()).status() == Status::not_permitted);
  }
  SECTION("a pipe") {
    int ends[2];
    REQUIRE(::pipe(ends) == 0);
    const UniqueFd in(ends[0]), out(ends[1]);
    CHECK(sealed_size(in.get()).status() == Status::not_permitted);
  }
  SECTION("no descriptor") {
    CHECK_FALSE(sealed_size(-1).ok());
  }
}

TEST_CASE("Mappings move and unmap once") {
  const auto fd = create_sealed("test", 4096);
  REQUIRE(fd.ok());
  auto first = Mapping::map(fd->get(), 4096, Mapping::Access::read_write);
  REQUIRE(first.ok());
  void* const data = first->data();
  Mapping second = std::move(first.value());
  CHECK_FALSE(first->valid());
  CHECK(second.data() == data);
  CHECK(second.size() == 4096);
  Mapping third;
  third = std::move(second);
  CHECK_FALSE(second.valid());  // NOLINT(bugprone-use-after-move): what a move leaves behind is the point
  std::memset(third.data(), 3, third.size());
}

TEST_CASE("A forked child does not inherit a channel's mapping") {
  const auto fd = create_sealed("test", 4096);
  REQUIRE(fd.ok());
  const auto hidden = Mapping::map(fd->get(), 4096, Mapping::Access::read_write, true);
  const auto shared = Mapping::map(fd->get(), 4096, Mapping::Access::read_write, false);
  REQUIRE(hidden.ok());
  REQUIRE(shared.ok());
  const ::pid_t child = ::fork();
  if (child == 0) {
    // mincore fails with ENOMEM where nothing is mapped.
    unsigned char resident = 0;
    const bool gone = ::mincore(hidden->data(), 4096, &resident) == -1 && errno == ENOMEM;
    const bool there = ::mincore(shared->data(), 4096, &resident) == 0;
    ::_exit(gone && there ? 0 : 1);
  }
  REQUIRE(child > 0);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

}  // namespace hicache
