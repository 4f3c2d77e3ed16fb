#include "tools/top/screen.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string_view>
#include <vector>

#include "tools/dump/config_view.hpp"

namespace hicache::top {
namespace {

double percent(double part, double whole) {
  return whole > 0 ? 100.0 * part / whole : 0.0;
}

std::string bar(double share) {
  constexpr std::size_t kWidth = 20;
  const auto full = static_cast<std::size_t>(std::lround(std::clamp(share, 0.0, 100.0) / 100.0 * kWidth));
  return "[" + std::string(full, '#') + std::string(kWidth - full, '.') + "]";
}

double giga(double bytes) {
  return bytes / 1e9;
}

std::string_view storage_state(std::uint64_t gauge) {
  constexpr std::string_view names[] = {"none", "attached", "suspended"};
  return gauge < std::size(names) ? names[gauge] : "unknown";
}

double milliseconds(double us, double batches) {
  return batches > 0 ? us / batches / 1000 : 0.0;
}

// The storage tier; nothing for a daemon that has none and never had.
void add_storage(std::vector<std::string>& lines, const Reading& r, const Rates& rates) {
  const std::uint64_t state = r.counter(Counter::storage_state);
  const auto since_start = [&r](Counter c) { return static_cast<double>(r.counter(c)); };
  if (state == 0 && r.counter(Counter::storage_queried) == 0 && r.counter(Counter::backups) == 0) return;
  const double asked = rates.rate(Counter::storage_queried);
  const double found = rates.rate(Counter::storage_hits);
  lines.push_back(fmt::format(
      "storage  {}, suspended {} times   hits {:.1f} %, {:.0f} of {:.0f} pages/s; since start {:.1f} %",
      storage_state(state), r.counter(Counter::storage_suspensions), percent(found, asked), found, asked,
      percent(since_start(Counter::storage_hits), since_start(Counter::storage_queried))));
  lines.push_back(
      fmt::format("         read {:.2f} GB/s ({:.1f} ms a batch), wrote {:.2f} GB/s ({:.1f} ms a batch); "
                  "waiting for backup {}, "
                  "being stored {}, prefetching {} pages",
                  giga(rates.rate(Counter::bytes_prefetched)),
                  milliseconds(rates.rate(Counter::storage_read_us), rates.rate(Counter::storage_reads)),
                  giga(rates.rate(Counter::bytes_backed_up)),
                  milliseconds(rates.rate(Counter::storage_write_us), rates.rate(Counter::storage_writes)),
                  r.counter(Counter::backup_queue_pages), r.counter(Counter::storing_pages),
                  r.counter(Counter::prefetching_pages)));
  lines.push_back(
      fmt::format("         since start: pages backed up {}, fetched {}; not backed up {}, not fetched {}, "
                  "damaged {}, late "
                  "batches {}, evicted dirty {}",
                  r.counter(Counter::backed_up), r.counter(Counter::prefetched),
                  r.counter(Counter::backup_full) + r.counter(Counter::backup_no_storage) +
                      r.counter(Counter::backup_gone) + r.counter(Counter::backup_no_space) +
                      r.counter(Counter::backup_timed_out) + r.counter(Counter::backup_failed),
                  r.counter(Counter::prefetch_failed), r.counter(Counter::storage_corrupt),
                  r.counter(Counter::storage_late), r.counter(Counter::evicted_dirty)));
}

}  // namespace

std::string screen(const Reading& r, const Rates& rates, std::size_t rows) {
  std::vector<std::string> lines;
  const auto line = [&lines](std::string text) { lines.push_back(std::move(text)); };
  if (!r.usable)
    return fmt::format("hicache: {}: {}\n", inspect::to_string(r.condition), inspect::printable(r.why));

  const auto gauge = [&r](Counter c) { return static_cast<double>(r.counter(c)); };
  const double pool = static_cast<double>(r.header.pool_bytes);
  const double pages = static_cast<double>(r.page_capacity);
  const double ready = gauge(Counter::ready_pages);
  const double used = gauge(Counter::used_pool_bytes);
  line(fmt::format("hicache {}: {} (pid {})   clients {}   leases {}   over the last {:.1f} s", r.header.name,
                   inspect::to_string(r.condition), r.header.daemon_pid, r.counter(Counter::attached_clients),
                   r.counter(Counter::live_leases), rates.seconds));
  line(fmt::format("pages    {} {:5.1f} %  {} ready, {} resident of {}, pins {}", bar(percent(ready, pages)),
                   percent(ready, pages), r.counter(Counter::ready_pages), r.counter(Counter::resident_pages),
                   r.page_capacity, r.counter(Counter::pinned_pages)));
  line(fmt::format("pool     {} {:5.1f} %  {:.2f} of {:.2f} GB", bar(percent(used, pool)),
                   percent(used, pool), giga(used), giga(pool)));
  line(fmt::format("hits     {} {:5.1f} %  {:.0f} of {:.0f} pages/s; since start {:.1f} %",
                   bar(percent(rates.rate(Counter::hits), rates.rate(Counter::pages_requested))),
                   percent(rates.rate(Counter::hits), rates.rate(Counter::pages_requested)),
                   rates.rate(Counter::hits), rates.rate(Counter::pages_requested),
                   percent(gauge(Counter::hits), gauge(Counter::pages_requested))));
  line(fmt::format(
      "copies   written {:.2f} GB/s, loaded {:.2f} GB/s; pages written {:.0f}/s, evicted {:.0f}/s, "
      "dropped {:.0f}/s",
      giga(rates.rate(Counter::bytes_written)), giga(rates.rate(Counter::bytes_loaded)),
      rates.rate(Counter::written), rates.rate(Counter::evicted), rates.rate(Counter::dropped)));
  line(fmt::format(
      "requests {:.0f} reserves/s, {:.0f} operations/s, {:.0f} failed/s; since start: timed out {}, "
      "divergences {}, lost clients {}, wrong checksums {}",
      rates.rate(Counter::reserves), rates.rate(Counter::operations), rates.rate(Counter::operations_failed),
      r.counter(Counter::timed_out), r.counter(Counter::divergences), r.counter(Counter::lost_clients),
      r.counter(Counter::checksum_mismatches)));
  add_storage(lines, r, rates);
  line("");
  line(fmt::format("{:<20} {:<10} {:>4} {:>8} {:>9} {:>9} {:>10} {:>8} {:>7} {:>8}", "ENGINE", "ROLE", "RANK",
                   "PID", "STATE", "OPS/S", "WRITE GB/S", "LOAD GB/S", "FLYING", "ERRORS"));
  std::size_t shown = 0;
  for (const ClientRate& client : rates.clients) {
    if (lines.size() + 2 > rows && shown + 1 < rates.clients.size()) break;
    const inspect::ClientRow& c = client.row;
    line(fmt::format("{:<20.20} {:<10} {:>4} {:>8} {:>9} {:>9.0f} {:>10.2f} {:>9.2f} {:>6} {:>8}", c.engine,
                     c.role, c.tp_rank, c.pid, c.state, client.operations, giga(client.bytes_written),
                     giga(client.bytes_loaded), c.operations_in_flight, c.errors));
    ++shown;
  }
  if (shown < rates.clients.size()) line(fmt::format("and {} more clients", rates.clients.size() - shown));
  return fmt::format("{}\n", fmt::join(lines, "\n"));
}

}  // namespace hicache::top
