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

TEST_CASE("the namespace that was held longest ago is the first to make room") {
  Fixture f;
  const NamespaceId first = f.table.find_or_create(spec_of("first", 0)).value();
  const NamespaceId second = f.table.find_or_create(spec_of("second", 0)).value();
  const NamespaceId third = f.table.find_or_create(spec_of("third", 0)).value();
  for (const NamespaceId id : {second, first, third}) {
    f.entries[id.value].resident_pages.store(1);
    f.table.hold(id);
  }
  CHECK_FALSE(f.table.longest_idle().has_value());
  f.table.drop(first);
  f.table.drop(second);
  REQUIRE(f.table.longest_idle() == first);
  f.table.hold(first);
  f.table.drop(first);
  REQUIRE(f.table.longest_idle() == second);
  // It makes room with its last page.
  f.table.retire(second);
  CHECK(f.table.longest_idle() == first);
  CHECK(f.table.find_or_create(spec_of("fourth", 0)).status() == Status::again);
  f.entries[second.value].resident_pages.store(0);
  CHECK(f.table.find_or_create(spec_of("fourth", 0)).value() == second);
}

TEST_CASE("a bump is not forgotten with the namespace: the last entry that knows of it stays") {
  Fixture f;
  const NamespaceId old = f.table.find_or_create(spec_of("model", 0)).value();
  REQUIRE(f.table.bump(to_hex(f.table.get(old).base_digest)).ok());
  const NamespaceId successor = f.table.find_or_create(spec_of("model", 0)).value();
  // The old one goes, because its successor knows; the others make room for each other.
  for (int i = 0; i < 8; ++i) {
    INFO(i);
    const auto other = f.table.find_or_create(spec_of("other-" + std::to_string(i), 0));
    REQUIRE(other.ok());
    CHECK(other.value() != successor);
  }
  CHECK(f.table.known(successor));
  CHECK(f.table.find_or_create(spec_of("model", 0)).value() == successor);
  CHECK(f.table.get(successor).spec.weights_epoch == 1);
}

}  // namespace hicache::daemon
