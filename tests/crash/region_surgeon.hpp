// Opens the control region of a dead daemon for writing, to damage it on purpose.
#pragma once

#include <unistd.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "shm/page_word.hpp"
#include "shm/region.hpp"
#include "shm/shared_memory.hpp"

namespace hicache::test {

class RegionSurgeon {
 public:
  explicit RegionSurgeon(const std::string& name) {
    auto fd = open_named(control_object_name(name), Mapping::Access::read_write);
    if (!fd) throw std::runtime_error(fd.error().message);
    const auto size = object_size(fd->get());
    std::vector<std::uint8_t> header(sizeof(RegionHeader));
    if (::pread(fd->get(), header.data(), header.size(), 0) != static_cast<ssize_t>(header.size())) {
      throw std::runtime_error("short control region");
    }
    const RegionCheck check = check_header(header, *size);
    if (check.verdict != RegionVerdict::usable) throw std::runtime_error(check.findings.front());
    auto map = Mapping::map(fd->get(), *size, Mapping::Access::read_write);
    if (!map) throw std::runtime_error(map.error().message);
    map_ = std::move(*map);
    tables_ = make_tables(map_.data(), check.plan);
  }

  [[nodiscard]] const Tables& tables() const { return tables_; }
  [[nodiscard]] std::uint64_t counter(Counter c) const {
    return tables_.counters[static_cast<std::uint32_t>(c)].load(std::memory_order_relaxed);
  }
  [[nodiscard]] std::vector<std::uint32_t> ready_pages() const {
    std::vector<std::uint32_t> out;
    for (std::uint32_t i = 0; i < tables_.pages.size(); ++i) {
      if (PageWord::decode(tables_.pages[i].word.load(std::memory_order_relaxed)).readable())
        out.push_back(i);
    }
    return out;
  }

 private:
  Mapping map_;
  Tables tables_;
};

}  // namespace hicache::test
