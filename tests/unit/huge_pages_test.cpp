// Huge pages for the pool, on whatever this machine allows.
#include "daemon/huge_pages.hpp"

#include "shm/shared_memory.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/processes.hpp"

namespace hicache::daemon {
namespace {

constexpr std::uint64_t kBytes = 4 * kMiB + 64 * kKiB;

// A shared memory object's name that is removed when it goes.
struct Name {
  std::string text = "hicache.huge." + test::unique_region_name();
  ~Name() { remove_named(text); }
};

}  // namespace

TEST_CASE(
    "pool.huge_pages require either gives a pool of huge pages or refuses and says what the machine allows") {
  const Name name;
  const auto fd = create_named(name.text, kBytes,
                               [](int f) { return fill_with_huge_pages(f, kBytes, HugePages::require); });
  if (fd) {
    CHECK(*object_size(fd->get()) == kBytes);
    return;
  }
  CHECK((fd.status() == Status::no_space || fd.status() == Status::not_permitted));
  CHECK(fd.error().message.find("pool.huge_pages is \"require\"") != std::string::npos);
  CHECK(fd.error().message.find(shmem_huge_policy()) != std::string::npos);
  CHECK(open_named(name.text, Mapping::Access::read_only).status() ==
        Status::not_found);  // nothing is left behind
}

TEST_CASE("pool.huge_pages prefer and off make the whole pool whatever the machine allows") {
  for (const HugePages wanted : {HugePages::prefer, HugePages::off}) {
    const Name name;
    const auto fd =
        create_named(name.text, kBytes, [&](int f) { return fill_with_huge_pages(f, kBytes, wanted); });
    REQUIRE(fd);
    auto mapping = Mapping::map(fd->get(), kBytes, Mapping::Access::read_write);
    REQUIRE(mapping);
    static_cast<std::uint8_t*>(mapping->data())[kBytes - 1] = 1;
    CHECK(*object_size(fd->get()) == kBytes);
  }
}

}  // namespace hicache::daemon
