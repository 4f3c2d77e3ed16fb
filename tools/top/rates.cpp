#include "tools/top/rates.hpp"

#include <algorithm>

#include "shm/clock.hpp"

namespace hicache::top {
namespace {

double per_second(std::uint64_t before, std::uint64_t after, double seconds) {
  return after > before && seconds > 0 ? static_cast<double>(after - before) / seconds : 0.0;
}

}  // namespace

Reading read(inspect::RegionSource& source) {
  using inspect::Snapshot;
  const Snapshot snapshot = Snapshot::take(source, Snapshot::Extent::small_tables);
  Reading reading;
  reading.time_ns = monotonic_ns();
  reading.condition = snapshot.verdict().condition;
  reading.why = snapshot.verdict().why;
  reading.usable = snapshot.usable();
  if (!reading.usable) return reading;
  reading.header = inspect::decode_header(*snapshot.tables().header);
  reading.page_capacity = snapshot.page_capacity();
  for (std::size_t i = 0; i < reading.counters.size(); ++i)
    reading.counters[i] = inspect::get(snapshot.tables().counters[i]);
  reading.clients = inspect::decode_clients(snapshot.tables());
  reading.namespaces = inspect::decode_namespaces(snapshot.tables());
  return reading;
}

Rates rates_between(const Reading& before, const Reading& after) {
  Rates rates;
  const bool same_life = before.usable && after.usable && after.time_ns > before.time_ns &&
                         before.header.instance_epoch == after.header.instance_epoch;
  if (same_life) rates.seconds = static_cast<double>(after.time_ns - before.time_ns) / 1e9;
  for (std::size_t i = 0; i < rates.counters.size(); ++i)
    rates.counters[i] = per_second(before.counters[i], after.counters[i], rates.seconds);
  for (const inspect::ClientRow& row : after.clients) {
    ClientRate client;
    client.row = row;
    // One that came in between started at zero.
    inspect::ClientRow old;
    const auto found = std::find_if(before.clients.begin(), before.clients.end(), [&](const auto& other) {
      return other.slot == row.slot && other.generation == row.generation;
    });
    if (found != before.clients.end()) old = *found;
    client.operations = per_second(old.operations, row.operations, rates.seconds);
    client.bytes_written = per_second(old.bytes_written, row.bytes_written, rates.seconds);
    client.bytes_loaded = per_second(old.bytes_loaded, row.bytes_loaded, rates.seconds);
    rates.clients.push_back(client);
  }
  std::stable_sort(rates.clients.begin(), rates.clients.end(), [](const ClientRate& a, const ClientRate& b) {
    return a.bytes_written + a.bytes_loaded > b.bytes_written + b.bytes_loaded;
  });
  return rates;
}

}  // namespace hicache::top
