#include "daemon/coordinator/namespace_table.hpp"

#include "shm/prefix_hash.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/memory_region.hpp"

namespace hicache::daemon {
namespace {

constexpr std::uint32_t kEntries = 3;

struct Fixture {
  test::MemoryRegion region{test::MemoryRegion::small(16, 16)};
  SlotAllocator slots{region.tables().segments, 64 * kKiB};
  std::vector<NamespaceEntry> entries = std::vector<NamespaceEntry>(kEntries);
  NamespaceTable table{entries, slots};
};

NamespaceSpec spec_of(const std::string& model, std::uint64_t epoch) {
  NamespaceSpec spec;
  spec.model = model;
  spec.dtype = "bfloat16";
  spec.page_tokens = 4;
  spec.layers = 2;
  spec.heads_per_shard = 1;
  spec.head_dim = 16;
  spec.element_bytes = 2;
  spec.weights_epoch = epoch;
  return spec;
}

}  // namespace

TEST_CASE("a bump gives every epoch of a model a successor of its own") {
  Fixture f;
  const NamespaceId first = f.table.find_or_create(spec_of("model", 1)).value();
  const auto retired = f.table.bump(to_hex(f.table.get(first).base_digest));
  REQUIRE(retired.ok());
  REQUIRE(retired.value() == std::vector{first});
  const NamespaceId next{f.entries[first.value].successor.load()};
  REQUIRE(f.table.known(next));
  CHECK(next != first);
  CHECK(f.table.get(next).spec.weights_epoch == 2);
  CHECK(f.table.find_or_create(spec_of("model", 1)).value() == next);
}

TEST_CASE(
    "a bump in a full namespace table makes room only by what nobody uses, and never by what it replaces") {
  Fixture f;
  const NamespaceId first = f.table.find_or_create(spec_of("model", 1)).value();
  const NamespaceId second = f.table.find_or_create(spec_of("model", 5)).value();
  const NamespaceId other = f.table.find_or_create(spec_of("other", 0)).value();
  const std::string base = to_hex(f.table.get(first).base_digest);

  SECTION("all or nothing: one free entry is not enough for two") {
    REQUIRE(f.table.bump(base).status() == Status::again);
    CHECK_FALSE(f.table.retired(first));
    CHECK_FALSE(f.table.retired(second));
    // The epochs did not move either.
    CHECK(f.table.find_or_create(spec_of("model", 1)).value() == first);
    CHECK(f.table.find_or_create(spec_of("model", 5)).value() == second);
  }
  SECTION("what is held stays") {
    f.table.hold(other);
    REQUIRE(f.table.bump(base).status() == Status::again);
    REQUIRE(f.table.known(other));
    CHECK(f.table.get(other).spec.model == "other");
    CHECK_FALSE(f.table.retired(first));
  }
}

}  // namespace hicache::daemon
