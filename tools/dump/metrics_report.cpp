#include "tools/dump/metrics_report.hpp"

#include <cstdint>
#include <string>
#include <string_view>

#include "shm/counters.hpp"
#include "tools/dump/decode.hpp"

namespace hicache::inspect {
namespace {

constexpr std::string_view kGaugePrefix = "gauge: ";

// Label values may hold anything but these three as they are.
std::string label(std::string_view value) {
  std::string out;
  for (const char c : value) {
    if (c == '\\' || c == '"') out.push_back('\\');
    out.push_back(c == '\n' ? ' ' : c);
  }
  return out;
}

void describe(Output& out, std::string_view name, std::string_view help, std::string_view type) {
  out.line("# HELP {} {}", name, help);
  out.line("# TYPE {} {}", name, type);
}

void write_counters(Output& out, const ConstTables& tables, const std::string& daemon) {
  for (std::uint32_t i = 0; i < kCounterCount; ++i) {
    const auto counter = static_cast<Counter>(i);
    std::string_view help = counter_help(counter);
    const bool gauge = help.substr(0, kGaugePrefix.size()) == kGaugePrefix;
    if (gauge) help.remove_prefix(kGaugePrefix.size());
    const std::string name = "hicache_" + std::string(counter_name(counter)) + (gauge ? "" : "_total");
    describe(out, name, help, gauge ? "gauge" : "counter");
    out.line("{}{{daemon=\"{}\"}} {}", name, daemon, get(tables.counters[i]));
  }
}

struct NamespaceMetric {
  std::string_view name;
  std::string_view help;
  std::string_view type;
  std::uint64_t NamespaceRow::*value;
};
constexpr NamespaceMetric kNamespaceMetrics[] = {
    {"hicache_namespace_resident_pages", "pages of the namespace that are not free", "gauge",
     &NamespaceRow::resident_pages},
    {"hicache_namespace_hits_total", "pages found present at reserve", "counter", &NamespaceRow::hits},
    {"hicache_namespace_written_total", "pages published", "counter", &NamespaceRow::written},
    {"hicache_namespace_evicted_total", "pages evicted", "counter", &NamespaceRow::evicted},
};

struct ClientMetric {
  std::string_view name;
  std::string_view help;
  std::string_view type;
  std::uint64_t ClientRow::*value;
};
constexpr ClientMetric kClientMetrics[] = {
    {"hicache_client_operations_total", "ring entries executed", "counter", &ClientRow::operations},
    {"hicache_client_errors_total", "operations that ended with an error", "counter", &ClientRow::errors},
    {"hicache_client_over_quota_total", "operations refused because of a quota of the client", "counter",
     &ClientRow::over_quota},
    {"hicache_client_bytes_written_total", "bytes copied device to host", "counter",
     &ClientRow::bytes_written},
    {"hicache_client_bytes_loaded_total", "bytes copied host to device", "counter", &ClientRow::bytes_loaded},
};

}  // namespace

void write_metrics(Output& out, const Snapshot& snapshot) {
  const HeaderRow header = decode_header(*snapshot.tables().header);
  const std::string daemon = label(snapshot.readable() ? header.name : "");
  const bool up = snapshot.usable() && snapshot.daemon_alive();
  describe(out, "hicache_up", "1 while the daemon runs", "gauge");
  out.line("hicache_up{{daemon=\"{}\"}} {}", daemon, up ? 1 : 0);
  if (!snapshot.usable()) return;

  describe(out, "hicache_pool_bytes", "size of the pool", "gauge");
  out.line("hicache_pool_bytes{{daemon=\"{}\"}} {}", daemon, header.pool_bytes);
  describe(out, "hicache_page_capacity", "entries of the page table", "gauge");
  out.line("hicache_page_capacity{{daemon=\"{}\"}} {}", daemon, snapshot.page_capacity());
  write_counters(out, snapshot.tables(), daemon);

  const auto namespaces = decode_namespaces(snapshot.tables());
  for (const NamespaceMetric& metric : kNamespaceMetrics) {
    if (namespaces.empty()) break;
    describe(out, metric.name, metric.help, metric.type);
    for (const NamespaceRow& row : namespaces) {
      out.line("{}{{daemon=\"{}\",namespace=\"{}\",label=\"{}\"}} {}", metric.name, daemon,
               row.digest.substr(0, 16), label(row.label), row.*metric.value);
    }
  }
  const auto clients = decode_clients(snapshot.tables());
  for (const ClientMetric& metric : kClientMetrics) {
    if (clients.empty()) break;
    describe(out, metric.name, metric.help, metric.type);
    for (const ClientRow& row : clients) {
      out.line("{}{{daemon=\"{}\",engine=\"{}\",role=\"{}\",rank=\"{}\",pid=\"{}\",slot=\"{}\"}} {}",
               metric.name, daemon, label(row.engine), label(row.role), row.tp_rank, row.pid, row.slot,
               row.*metric.value);
    }
  }
}

}  // namespace hicache::inspect
