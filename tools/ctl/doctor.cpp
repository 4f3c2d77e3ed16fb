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

constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;

const char* to_text(Level level) {
  switch (level) {
    case Level::ok:
      return "ok";
    case Level::warn:
      return "warn";
    case Level::fail:
      return "fail";
  }
  return "?";
}

std::size_t count(const std::vector<Check>& checks, Level level) {
  return static_cast<std::size_t>(
      std::count_if(checks.begin(), checks.end(), [level](const Check& c) { return c.level == level; }));
}

}  // namespace

std::string doctor_text(const std::vector<Check>& checks) {
  std::string text;
  for (const Check& c : checks) {
    text += fmt::format("{:<5} {:<20} {}\n", to_text(c.level), c.name, printable(c.found));
    if (!c.remedy.empty()) text += fmt::format("{:<26} -> {}\n", "", printable(c.remedy));
  }
  text += fmt::format("{} ok, {} warnings, {} failed\n", count(checks, Level::ok), count(checks, Level::warn),
                      count(checks, Level::fail));
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
                                   {"warnings", count(checks, Level::warn)},
                                   {"failed", count(checks, Level::fail)}};
  return doc.dump(2, ' ', true, nlohmann::json::error_handler_t::replace) + "\n";
}

int doctor_exit_code(const std::vector<Check>& checks) {
  return count(checks, Level::fail) > 0 ? kExitFailed : 0;
}

int run_doctor(int argc, const char* const* argv) {
  std::string config_path;
  bool as_json = false;
  CLI::App app{"hicache-ctl doctor: says what a hicached will meet on this machine; no daemon is needed"};
  app.add_option("--config", config_path, "the daemon's configuration; the defaults unless given");
  app.add_flag("--json", as_json, "one JSON document instead of text");
  app.footer("Exit status: 0 a daemon can start, 1 a check failed, 2 wrong command line or configuration.");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : kExitUsage;
  }
  daemon::Config config;
  if (!config_path.empty()) {
    auto loaded = daemon::load_config(config_path);
    if (!loaded) {
      std::fprintf(stderr, "hicache-ctl: %s\n", printable(loaded.error().message).c_str());
      return kExitUsage;
    }
    config = std::move(*loaded);
  }
  const auto checks = examine(config, measure(config, Probes::real()));
  std::fputs((as_json ? doctor_json(checks) : doctor_text(checks)).c_str(), stdout);
  return doctor_exit_code(checks);
}

}  // namespace hicache::ctl
