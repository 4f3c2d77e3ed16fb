#include "tools/bench/policy_rates.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>

#include "tools/bench/tree_replay.hpp"

namespace hicache::bench {
namespace {

double rate(std::uint64_t hits, std::uint64_t pages) {
  return static_cast<double>(hits) / static_cast<double>(std::max<std::uint64_t>(pages, 1));
}

}  // namespace

Result<std::vector<PolicyRow>> compare_policies(const Workload& workload) {
  std::vector<PolicyRow> rows;
  for (const std::uint64_t pages : kComparedPages) {
    PolicyRow row;
    row.pages = pages;
    for (std::size_t i = 0; i < kTreePolicies.size(); ++i) {
      const auto hits = replay_on_tree(workload, pages, kTreePolicies[i].policy);
      if (!hits) return hits.error();
      row.hits[i] = *hits;
    }
    rows.push_back(row);
  }
  return rows;
}

std::string policy_text(const std::vector<PolicyRow>& rows, std::uint64_t requested_pages) {
  std::string text = "  hits by host pages and policy of the tree\n";
  for (const PolicyRow& row : rows) {
    fmt::format_to(std::back_inserter(text), "    {:>6} pages", row.pages);
    for (std::size_t i = 0; i < kTreePolicies.size(); ++i) {
      fmt::format_to(std::back_inserter(text), "  {} {} ({:.1f} %)", kTreePolicies[i].name, row.hits[i],
                     100 * rate(row.hits[i], requested_pages));
    }
    text += '\n';
  }
  return text;
}

nlohmann::json policy_json(const std::vector<PolicyRow>& rows, std::uint64_t requested_pages) {
  auto list = nlohmann::json::array();
  for (const PolicyRow& row : rows) {
    nlohmann::json entry{{"pages", row.pages}};
    for (std::size_t i = 0; i < kTreePolicies.size(); ++i) {
      entry[kTreePolicies[i].name] = {{"hits", row.hits[i]},
                                      {"hit_rate", rate(row.hits[i], requested_pages)}};
    }
    list.push_back(std::move(entry));
  }
  return list;
}

}  // namespace hicache::bench
