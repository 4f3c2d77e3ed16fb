#include "tools/bench/report.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "tools/bench/machine.hpp"

namespace hicache::bench {
namespace {

const char* attention_name(Attention attention) {
  return attention == Attention::mha ? "mha" : "mla";
}

double ratio(std::uint64_t part, std::uint64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

std::string with_commas(std::uint64_t n) {
  if (n < 1000) return fmt::format("{}", n);
  return fmt::format("{},{:03}", with_commas(n / 1000), n % 1000);
}

std::string bytes_text(std::uint64_t bytes) {
  return fmt::format("{:.2f} GB", static_cast<double>(bytes) / 1e9);
}

std::uint64_t daemon_count(const ReplayResult& result, const char* name) {
  const auto at = result.daemon.find(name);
  return at == result.daemon.end() ? 0 : at->second;
}

// Sums over the groups; rates add up because the groups work at the same time.
GroupTotals sum_of(const ReplayResult& result) {
  GroupTotals sum;
  for (const GroupTotals& group : result.groups) {
    sum.requests += group.requests;
    sum.pages += group.pages;
    sum.hits += group.hits;
    sum.fetched += group.fetched;
    sum.full_hits += group.full_hits;
    sum.written += group.written;
    sum.present += group.present;
    sum.filling += group.filling;
    sum.dropped += group.dropped;
    sum.bytes_written += group.bytes_written;
    sum.bytes_loaded += group.bytes_loaded;
    sum.verified_words += group.verified_words;
    sum.verify_errors += group.verify_errors;
    sum.failed_operations += group.failed_operations;
    sum.probe_differences += group.probe_differences;
    sum.write_gbps += group.write_gbps;
    sum.load_gbps += group.load_gbps;
  }
  return sum;
}

nlohmann::json totals_json(const GroupTotals& totals) {
  return {{"requests", totals.requests},
          {"pages", totals.pages},
          {"hits", totals.hits},
          {"hits_from_storage", totals.fetched},
          {"hit_rate", ratio(totals.hits, totals.pages)},
          {"full_hits", totals.full_hits},
          {"written", totals.written},
          {"already_present", totals.present},
          {"filling_elsewhere", totals.filling},
          {"dropped", totals.dropped},
          {"verify_errors", totals.verify_errors},
          {"verified_words", totals.verified_words},
          {"failed_operations", totals.failed_operations},
          {"probe_differences", totals.probe_differences},
          {"bytes_written", totals.bytes_written},
          {"bytes_loaded", totals.bytes_loaded},
          {"write_gbps", totals.write_gbps},
          {"load_gbps", totals.load_gbps}};
}

}  // namespace

nlohmann::json latency_json(const LatencyHistogram& latency) {
  return {{"count", latency.count()},
          {"mean", latency.mean() / 1e3},
          {"p50", latency.quantile(0.5) / 1e3},
          {"p90", latency.quantile(0.9) / 1e3},
          {"p99", latency.quantile(0.99) / 1e3},
          {"p99_9", latency.quantile(0.999) / 1e3},
          {"max", static_cast<double>(latency.max()) / 1e3}};
}

nlohmann::json replay_json(const ReplayOptions& options, const ReplayResult& result) {
  nlohmann::json json = totals_json(sum_of(result));
  json["evicted"] = daemon_count(result, "evicted");
  json["seconds"] = result.seconds;
  json["ranks"] = options.ranks;
  json["concurrency"] = options.concurrency;
  json["controller"] = options.controller;
  if (options.controller) {
    for (const NamedPolicy& policy : kTreePolicies) {
      if (policy.policy == options.policy) json["policy"] = policy.name;
    }
    json["policies"] = policy_json(result.policies, result.groups.empty() ? 0 : result.groups.front().pages);
  }
  json["pool_pages"] = options.pool_pages;
  json["trace"] = options.trace;
  if (options.trace.empty()) json["seed"] = options.conversations.seed;
  json["storage"] = options.storage;
  if (!options.storage.empty()) json["backed_up"] = daemon_count(result, "backed_up");
  json["dump_checks"] = result.dump_checks;
  json["success"] = result.success();
  json["faults"] = result.faults;
  json["engines"] = nlohmann::json::array();
  for (const GroupTotals& group : result.groups) {
    nlohmann::json engine = totals_json(group);
    engine["engine"] = group.engine;
    engine["attention"] = attention_name(group.attention);
    engine["page_bytes"] = group.page_bytes;
    engine["slot_bytes"] = group.slot_bytes;
    json["engines"].push_back(std::move(engine));
  }
  for (std::size_t i = 0; i < kTimedCount; ++i)
    json["latency_us"][kTimedNames[i]] = latency_json(result.latency[i]);
  json["daemon"] = result.daemon;
  json["machine"] = Machine::here().json();
  return json;
}

std::string replay_summary(const ReplayOptions& options, const ReplayResult& result) {
  std::string text;
  const auto line = [&](const char* name, const std::string& value) {
    fmt::format_to(std::back_inserter(text), "  {:<18}{}\n", name, value);
  };
  const GroupTotals sum = sum_of(result);
  std::string engines;
  for (const GroupTotals& group : result.groups) {
    fmt::format_to(std::back_inserter(engines), "{}{} x {} ({} KiB a page and rank, {} KiB of pool a page)",
                   engines.empty() ? "" : ", ", options.ranks, attention_name(group.attention),
                   group.page_bytes / kKiB, group.slot_bytes / kKiB);
  }
  text += options.trace.empty() ? fmt::format("Conversations (seed {})\n", options.conversations.seed)
                                : fmt::format("Trace {}\n", options.trace);
  line("machine", Machine::here().text());
  line("ranks", engines);
  line("requests", fmt::format("{} in {:.1f} s, each group works on {} at once", with_commas(sum.requests),
                               result.seconds, options.concurrency));
  line("pages asked for", with_commas(sum.pages));
  line("hits", fmt::format("{} (hit rate {:.1f} %, {} requests fully)", with_commas(sum.hits),
                           100 * ratio(sum.hits, sum.pages), with_commas(sum.full_hits)));
  line("pages written", with_commas(sum.written));
  line("evictions", with_commas(daemon_count(result, "evicted")));
  line("dropped", with_commas(sum.dropped));
  line("device to host", fmt::format("{} at {:.2f} GB/s", bytes_text(sum.bytes_written), sum.write_gbps));
  line("host to device", fmt::format("{} at {:.2f} GB/s", bytes_text(sum.bytes_loaded), sum.load_gbps));
  line("pool in use", fmt::format("{} for {} pages", bytes_text(daemon_count(result, "used_pool_bytes")),
                                  with_commas(daemon_count(result, "resident_pages"))));
  for (std::size_t i = 0; i < kTimedCount; ++i) {
    const LatencyHistogram& latency = result.latency[i];
    if (latency.count() == 0) continue;
    line(kTimedNames[i],
         fmt::format("p50 {:.1f} us, p99 {:.1f} us, p99.9 {:.1f} us", latency.quantile(0.5) / 1e3,
                     latency.quantile(0.99) / 1e3, latency.quantile(0.999) / 1e3));
  }
  if (options.dump_check) line("dump --check", fmt::format("{} runs", result.dump_checks));
  line("words checked", with_commas(sum.verified_words));
  line("errors", fmt::format("{}", sum.verify_errors + sum.failed_operations));
  if (!result.policies.empty()) text += policy_text(result.policies, result.groups.front().pages);
  if (result.interrupted) text += "  interrupted\n";
  for (const std::string& fault : result.faults)
    fmt::format_to(std::back_inserter(text), "  FAULT: {}\n", fault);
  return text;
}

Outcome write_json(const std::string& path, const nlohmann::json& json) {
  if (path.empty()) return success();
  if (path == "-") {
    fmt::print("{}\n", json.dump(2));
    return success();
  }
  std::ofstream out(path);
  out << json.dump(2) << '\n';
  if (!out.flush()) {
    const int error = errno;
    return Error{Status::system_error, fmt::format("{}: {}", path, std::strerror(error)), error};
  }
  return success();
}

}  // namespace hicache::bench
