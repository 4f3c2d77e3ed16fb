#include "tools/ctl/tables.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

namespace hicache::ctl {
namespace {

using nlohmann::json;

constexpr std::size_t kDigestShown = 16;

std::string bytes_text(const json& value) {
  if (!value.is_number()) return printable(value.dump());
  auto amount = value.get<double>();
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  while (amount >= 1024 && unit + 1 < kUnits.size()) {
    amount /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", amount) : fmt::format("{:.2f} {}", amount, kUnits[unit]);
}

std::string plain_text(const json& value) {
  if (value.is_null()) return "-";
  return printable(value.is_string() ? value.get<std::string>() : value.dump());
}

std::string digest_text(const json& value) {
  return plain_text(value).substr(0, kDigestShown);
}

struct Column {
  const char* title;
  const char* key;
  std::string (*format)(const json&);
  bool left = false;
};

std::string table(const json& rows, const std::vector<Column>& columns, const std::string& when_empty) {
  if (!rows.is_array() || rows.empty()) return when_empty + "\n";
  std::vector<std::vector<std::string>> cells(1);
  for (const Column& c : columns) cells[0].emplace_back(c.title);
  for (const json& row : rows) {
    auto& line = cells.emplace_back();
    for (const Column& c : columns) {
      const auto it = row.find(c.key);
      line.push_back(it == row.end() ? "-" : c.format(*it));
    }
  }
  std::string out;
  for (const auto& line : cells) {
    for (std::size_t i = 0; i < columns.size(); ++i) {
      std::size_t width = 0;
      for (const auto& other : cells) width = std::max(width, other[i].size());
      out += columns[i].left ? fmt::format("{:<{}}", line[i], width) : fmt::format("{:>{}}", line[i], width);
      out += i + 1 < columns.size() ? "  " : "\n";
    }
  }
  return out;
}

std::string cuda_text(const json& cuda) {
  const auto at = [](const json& object, const char* key) {
    return object.contains(key) ? object[key] : json();
  };
  if (at(cuda, "state") != "on") return fmt::format("CUDA   off: {}\n", plain_text(at(cuda, "reason")));
  std::string out = fmt::format("CUDA   on, {} of {} pinned ({})\n", bytes_text(at(cuda, "pinned_bytes")),
                                bytes_text(at(cuda, "pool_bytes")), plain_text(at(cuda, "pinning")));
  for (const json& gpu : at(cuda, "gpus")) {
    out += fmt::format("  {} {}: {}, {} transfers, {} failed, {} written, {} loaded\n",
                       plain_text(at(gpu, "name")), plain_text(at(gpu, "uuid")), plain_text(at(gpu, "state")),
                       plain_text(at(gpu, "transfers")), plain_text(at(gpu, "failed")),
                       bytes_text(at(gpu, "bytes_written")), bytes_text(at(gpu, "bytes_loaded")));
  }
  return out;
}

std::string at_text(const json& object, const char* key) {
  return object.is_object() && object.contains(key) ? plain_text(object[key]) : "-";
}

std::string storage_line(const json& storage) {
  std::string out = "storage " + at_text(storage, "state");
  if (!storage.contains("backend")) return out + "\n";
  const json& backend = storage["backend"];
  return out + fmt::format(": {}, {}\n", at_text(backend, "name"), at_text(backend, "health"));
}

std::string gb_text(const json& value) {
  return value.is_number() ? fmt::format("{:.2f}", value.get<double>()) : printable(value.dump());
}

// What `storage status` answers.
std::string storage_text(const json& storage) {
  const json breaker = storage.contains("breaker") ? storage["breaker"] : json::object();
  std::string out =
      storage_line(storage) +
      fmt::format("breaker {}, {} failures in a row, opened {} times\n", at_text(breaker, "state"),
                  at_text(breaker, "failures_in_a_row"), at_text(breaker, "openings")) +
      fmt::format(
          "queues  {} reads, {} writes, {} late batches; {} prefetches in flight, {} pages to back up\n",
          at_text(storage, "read_queue"), at_text(storage, "write_queue"), at_text(storage, "late_batches"),
          at_text(storage, "prefetches_in_flight"), at_text(storage, "backup_queue_pages"));
  json rows = json::array();
  if (storage.contains("operations") && storage["operations"].is_object()) {
    for (const auto& [name, operation] : storage["operations"].items()) {
      if (!operation.is_object()) continue;
      rows.push_back(operation);
      rows.back()["operation"] = name;
    }
  }
  return out + table(rows,
                     {{"operation", "operation", plain_text, true},
                      {"batches", "batches", plain_text},
                      {"running", "in_flight", plain_text},
                      {"pages", "pages", plain_text},
                      {"good", "good_pages", plain_text},
                      {"bytes", "bytes", bytes_text},
                      {"mean us", "mean_us", plain_text},
                      {"p99 us", "p99_us", plain_text},
                      {"max us", "max_us", plain_text},
                      {"GB/s", "gb_per_second", gb_text}},
                     "no operations");
}

std::string status_text(const json& a) {
  const json none = json::object();
  const json& pool = a.contains("pool") ? a["pool"] : none;
  const json& pages = a.contains("pages") ? a["pages"] : none;
  const json& counters = a.contains("counters") ? a["counters"] : none;
  const auto at = [](const json& object, const char* key) {
    return object.contains(key) ? object[key] : json();
  };
  std::string out = fmt::format("daemon {} (pid {}): {}\n", plain_text(at(a, "name")),
                                plain_text(at(a, "pid")), plain_text(at(a, "state"))) +
                    fmt::format("pool   {} of {} in use, {} of {} segments assigned\n",
                                bytes_text(at(pool, "used_bytes")), bytes_text(at(pool, "bytes")),
                                plain_text(at(pool, "assigned_segments")), plain_text(at(pool, "segments"))) +
                    fmt::format("pages  {} resident of {}\n", plain_text(at(pages, "resident")),
                                plain_text(at(pages, "capacity")));
  if (a.contains("cuda")) out += cuda_text(a["cuda"]);
  if (a.contains("storage") && a["storage"].is_object()) out += storage_line(a["storage"]);
  std::size_t width = 0;
  for (const auto& [name, value] : counters.items()) width = std::max(width, name.size());
  for (const auto& [name, value] : counters.items()) {
    if (value != 0) out += fmt::format("  {:<{}}  {}\n", printable(name), width, plain_text(value));
  }
  return out;
}

}  // namespace

std::string printable(const std::string& text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    out.push_back(byte >= 0x20 && byte < 0x7f ? c : '?');
  }
  return out;
}

std::string render(const std::string& command, const json& answer) {
  if (command == "status" && answer.is_object()) return status_text(answer);
  if (command == "storage" && answer.contains("operations")) return storage_text(answer);
  if (command == "ranks" && answer.contains("ranks")) {
    return table(answer["ranks"],
                 {{"client", "client", plain_text},
                  {"role", "role", plain_text, true},
                  {"engine", "engine", plain_text, true},
                  {"rank", "tp_rank", plain_text},
                  {"of", "tp_size", plain_text},
                  {"ns", "namespace", plain_text},
                  {"pid", "pid", plain_text},
                  {"uid", "uid", plain_text},
                  {"group", "group_state", plain_text, true},
                  {"leases", "group_leases", plain_text},
                  {"pinned", "group_pinned_bytes", bytes_text},
                  {"device pages", "device_pages", plain_text},
                  {"operations", "operations", plain_text},
                  {"open", "open_operations", plain_text},
                  {"errors", "errors", plain_text},
                  {"written", "bytes_written", bytes_text},
                  {"loaded", "bytes_loaded", bytes_text}},
                 "no client is attached");
  }
  if (command == "namespaces" && answer.contains("namespaces")) {
    return table(answer["namespaces"],
                 {{"ns", "namespace", plain_text},
                  {"state", "state", plain_text, true},
                  {"base digest", "base_digest", digest_text, true},
                  {"epoch", "weights_epoch", plain_text},
                  {"model", "model", plain_text, true},
                  {"shards", "shards", plain_text},
                  {"page", "slot_bytes", bytes_text},
                  {"resident", "resident_pages", plain_text},
                  {"in pool", "resident_bytes", bytes_text},
                  {"hits", "hits", plain_text},
                  {"written", "written", plain_text},
                  {"evicted", "evicted", plain_text},
                  {"clients", "attached_clients", plain_text}},
                 "no namespace is known");
  }
  if (command == "evict-client" && answer.contains("evicted_client")) {
    return "client " + answer["evicted_client"].dump() + " (pid " +
           answer.value("pid", nlohmann::json()).dump() + ") is cut off\n";
  }
  if ((command == "clear" || command == "evict") && answer.contains("evicted")) {
    return fmt::format("{} pages evicted, {} resident\n", plain_text(answer["evicted"]),
                       answer.contains("resident") ? plain_text(answer["resident"]) : "?");
  }
  if (command == "namespace" && answer.contains("bumped")) {
    return table(answer["bumped"],
                 {{"ns", "namespace", plain_text},
                  {"new ns", "successor", plain_text},
                  {"new epoch", "weights_epoch", plain_text},
                  {"pages evicted", "evicted", plain_text}},
                 "no namespace was bumped");
  }
  return answer.dump(2, ' ', true, json::error_handler_t::replace) + "\n";
}

}  // namespace hicache::ctl
