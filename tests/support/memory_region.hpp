// A control region in private memory, for tests of what works on its tables.
#pragma once

#include <cstdlib>
#include <memory>

#include "shm/region.hpp"

namespace hicache::test {

class MemoryRegion {
 public:
  explicit MemoryRegion(const RegionShape& shape) : plan_(plan_region(shape)) {
    memory_.reset(std::aligned_alloc(4096, plan_.total_bytes));
    std::memset(memory_.get(), 0, plan_.total_bytes);
    tables_ = make_tables(memory_.get(), plan_);
    tables_.header->hash_seed.store(0x5eed, std::memory_order_relaxed);
  }
  [[nodiscard]] Tables& tables() { return tables_; }
  [[nodiscard]] ConstTables const_tables() const {
    return make_tables(static_cast<const void*>(memory_.get()), plan_);
  }

  // A small shape: `pages` pages, `segments` segments, everything else in proportion.
  static RegionShape small(std::uint32_t pages, std::uint32_t segments) {
    RegionShape shape;
    shape.namespaces = 8;
    shape.clients = 8;
    shape.groups = 8;
    shape.segments = segments;
    shape.index_buckets = 64;
    while (shape.index_buckets < 2 * pages) shape.index_buckets *= 2;
    shape.pages = pages;
    shape.leases = 64;
    shape.pin_chunks = pages + 64;
    shape.flight_records = 256;
    return shape;
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  RegionPlan plan_;
  std::unique_ptr<void, Free> memory_;
  Tables tables_;
};

}  // namespace hicache::test
