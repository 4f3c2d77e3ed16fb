// Damage in the pool: pages whose bytes change behind the daemon's back.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/crash/region_surgeon.hpp"
#include "tests/support/catch.hpp"

namespace hicache::test {

// Flips one bit in the middle of each page of `pages`.
inline void flip_bits(const std::string& name, const std::vector<std::uint32_t>& pages) {
  const RegionSurgeon region(name);
  auto fd = open_named(pool_object_name(name, 0), Mapping::Access::read_write);
  REQUIRE(fd.ok());
  auto pool = Mapping::map(fd->get(), *object_size(fd->get()), Mapping::Access::read_write);
  REQUIRE(pool.ok());
  for (const std::uint32_t page : pages) {
    static_cast<std::uint8_t*>(pool->data())[region.tables().pages[page].pool_offset + 77] ^= 4;
  }
}

}  // namespace hicache::test
