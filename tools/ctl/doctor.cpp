// The report of hicache-ctl doctor and its command line.
#include "tools/ctl/doctor.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "tools/ctl/tables.hpp"

namespace hicache::ctl {
namespace {

using machine::Check;
using machine::Level;

constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;

std::size_t count(const std::vector<Check>& checks, Level level) {
  return static_cast<std::size_t>(
      std::count_if(checks.begin(), checks.end(), [level](const Check& c) { return c.level == level; }));
}

}  // namespace

std::string doctor_text(const std::vector<Check>& checks) {
  std::string text;
  for (const Check& c : checks) {
    text += fmt::format("{:<8} {:<20} {}\n", to_text(c.level), c.name, printable(c.found));
    if (!c.remedy.empty()) text += fmt::format("{:<29} -> {}\n", "", printable(c.remedy));
  }
  text += fmt::format("{} ok, {} degraded, {} refused\n", count(checks, Level::ok),
                      count(checks, Level::degraded), count(checks, Level::refused));
  return text;
}

std::string doctor_json(const std::vector<Check>& checks) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Check& c : checks) {
    list.push_back(
        {{"check", c.name}, {"level", to_text(c.level)}, {"found", c.found}, {"remedy", c.remedy}});
  }
  const nlohmann::ordered_json doc{{"checks", list},
                                   {"ok", count(checks, Level::ok)},
                                   {"degraded", count(checks, Level::degraded)},
                                   {"refused", count(checks, Level::refused)}};
  return doc.dump(2, ' ', true, nlohmann::json::error_handler_t::replace) + "\n";
}

int doctor_exit_code(const std::vector<Check>& checks) {
  return count(checks, Level::refused) > 0 ? kExitFailed : 0;
}

int run_doctor(int argc, const char* const* argv) {
  std::string config_path;
  std::string hicached;
  bool as_json = false;
  CLI::App app{"hicache-ctl doctor: the start checks of a hicached, without starting one"};
  app.add_option("--config", config_path, "the daemon's configuration; the defaults unless given");
  app.add_option("--hicached", hicached,
                 "the program to ask what it needs; the one beside this program unless given, or of PATH");
  app.add_flag("--json", as_json, "one JSON document instead of text");
  app.footer(
      "Exit status: 0 a daemon can start, 1 a check refuses the start, 2 wrong command line or "
      "configuration, or no hicached to ask.");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : kExitUsage;
  }
  const auto needs = ask_needs(hicached, config_path);
  if (!needs) {
    std::fprintf(stderr, "hicache-ctl: %s\n", printable(needs.error().message).c_str());
    return kExitUsage;
  }
  const machine::Probes probes = machine::Probes::real();
  machine::Machine machine = machine::measure(*needs, probes);
  if (needs->gpus != machine::GpuNeed::none) machine::measure_gpus(probes, machine);
  std::vector<Check> checks = machine::examine(*needs, machine);
  checks.push_back(machine::check_gpus(*needs, machine));
  std::fputs((as_json ? doctor_json(checks) : doctor_text(checks)).c_str(), stdout);
  return doctor_exit_code(checks);
}

}  // namespace hicache::ctl
