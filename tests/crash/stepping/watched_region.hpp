// A stepped daemon's shared memory from outside: whether its last instruction changed the tables, and what is
// in them.
#pragma once

#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "tests/crash/region_surgeon.hpp"

namespace hicache::test {

class WatchedRegion {
 public:
  explicit WatchedRegion(const std::string& name) : region_(name) {
    const Tables& t = region_.tables();
    const auto* base = reinterpret_cast<const std::uint8_t*>(t.header);
    bytes_ = {base, t.header->region_bytes.load()};
    // Thousands of pin chunks are always made, whatever the limits are. The first 64 stand for the others.
    const auto* chunks = reinterpret_cast<const std::uint8_t*>(t.pin_chunks.data());
    const auto* counters = reinterpret_cast<const std::uint8_t*>(t.counters.data());
    watch(base, static_cast<std::size_t>(chunks - base) + 4096);
    watch(counters, static_cast<std::size_t>(base + bytes_.size() - counters));
    auto pool = open_named(pool_object_name(name, 0), Mapping::Access::read_write);
    if (!pool) throw std::runtime_error(pool.error().message);
    auto map = Mapping::map(pool->get(), *object_size(pool->get()), Mapping::Access::read_only);
    if (!map) throw std::runtime_error(map.error().message);
    pool_ = std::move(*map);
  }

  // True when the tables differ from what they were at the last call.
  bool changed() {
    bool any = false;
    for (Range& range : ranges_) {
      if (std::memcmp(range.live, range.seen.data(), range.seen.size()) == 0) continue;
      std::memcpy(range.seen.data(), range.live, range.seen.size());
      any = true;
    }
    return any;
  }
  [[nodiscard]] const Tables& tables() const { return region_.tables(); }
  [[nodiscard]] std::span<const std::uint8_t> bytes() const { return bytes_; }
  [[nodiscard]] const std::uint8_t* pool() const { return static_cast<const std::uint8_t*>(pool_.data()); }

 private:
  struct Range {
    const std::uint8_t* live;
    std::vector<std::uint8_t> seen;
  };
  void watch(const std::uint8_t* begin, std::size_t bytes) {
    ranges_.push_back({begin, std::vector<std::uint8_t>(begin, begin + bytes)});
  }

  RegionSurgeon region_;
  std::span<const std::uint8_t> bytes_;
  std::vector<Range> ranges_;
  Mapping pool_;
};

}  // namespace hicache::test
