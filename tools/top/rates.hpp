// Two readings of a region made into rates.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "shm/counters.hpp"
#include "tools/dump/decode.hpp"
#include "tools/dump/snapshot.hpp"

namespace hicache::top {

// What one reading keeps: counters and clients, not the region.
struct Reading {
  std::uint64_t time_ns = 0;  // CLOCK_MONOTONIC
  inspect::Condition condition = inspect::Condition::not_a_region;
  std::string why;
  bool usable = false;
  inspect::HeaderRow header;
  std::uint64_t page_capacity = 0;
  std::array<std::uint64_t, kCounterCount> counters{};
  std::vector<inspect::ClientRow> clients;
  std::vector<inspect::NamespaceRow> namespaces;

  [[nodiscard]] std::uint64_t counter(Counter c) const { return counters[static_cast<std::size_t>(c)]; }
};
Reading read(inspect::RegionSource& source);

struct ClientRate {
  inspect::ClientRow row;
  double operations = 0;     // a second
  double bytes_written = 0;  // a second
  double bytes_loaded = 0;   // a second
};

// Rates are per second between two readings of one daemon life; zero when the daemon was replaced in between.
struct Rates {
  double seconds = 0;
  std::array<double, kCounterCount> counters{};
  std::vector<ClientRate> clients;  // in order of bytes moved, most first

  [[nodiscard]] double rate(Counter c) const { return counters[static_cast<std::size_t>(c)]; }
};
Rates rates_between(const Reading& before, const Reading& after);

}  // namespace hicache::top
