// hicache-dump: looks inside the region of a running or dead daemon without touching it.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <optional>

#include "shm/version.hpp"
#include "tools/dump/config_view.hpp"
#include "tools/dump/json_report.hpp"
#include "tools/dump/metrics_report.hpp"
#include "tools/dump/output.hpp"
#include "tools/dump/region_check.hpp"
#include "tools/dump/region_source.hpp"
#include "tools/dump/text_report.hpp"

namespace hicache::inspect {
namespace {

enum ExitCode { kOk = 0, kFindings = 1, kDamaged = 2, kOtherVersion = 3, kNotFound = 4, kFailed = 5 };

struct Arguments {
  std::string name;
  std::string file;
  ReportOptions report;
  bool json = false;
  bool metrics = false;
  bool check = false;
};

int exit_code(const Snapshot& snapshot, const CheckReport* check) {
  switch (snapshot.verdict().condition) {
    case Condition::other_version:
      return kOtherVersion;
    case Condition::not_a_region:
    case Condition::initialising:
    case Condition::damaged:
      return kDamaged;
    default:
      return check != nullptr && !check->findings.empty() ? kFindings : kOk;
  }
}

int fail(const Error& error) {
  std::fprintf(stderr, "hicache-dump: %s\n", printable(error.message).c_str());
  if (error.status == Status::not_found) return kNotFound;
  return error.status == Status::corrupt ? kDamaged : kFailed;
}

int dump(const Arguments& arguments) {
  auto source = arguments.file.empty() ? FileSource::open_region(arguments.name)
                                       : FileSource::open_file(arguments.file);
  if (!source) return fail(source.error());
  const std::string what =
      arguments.file.empty() ? "region '" + arguments.name + "'" : "file '" + printable(arguments.file) + "'";
  const Snapshot snapshot = Snapshot::take(
      *source, arguments.metrics ? Snapshot::Extent::small_tables : Snapshot::Extent::everything);
  std::optional<CheckReport> report;
  if (arguments.check) report = check_region(*source, snapshot);

  Output out(STDOUT_FILENO);
  if (arguments.metrics) {
    write_metrics(out, snapshot);
  } else if (arguments.json) {
    const auto doc = to_json(snapshot, what, arguments.report, report ? &*report : nullptr);
    out.text(doc.dump(2, ' ', true, nlohmann::json::error_handler_t::replace));
  } else {
    write_text(out, snapshot, what, arguments.report);
    if (report) write_check(out, *report);
  }
  out.flush();
  if (out.error() != 0) {
    std::fprintf(stderr, "hicache-dump: cannot write the report: %s\n", std::strerror(out.error()));
    return kFailed;
  }
  return exit_code(snapshot, report ? &*report : nullptr);
}

}  // namespace
}  // namespace hicache::inspect

int main(int argc, char** argv) {
  using namespace hicache::inspect;
  std::signal(SIGPIPE, SIG_IGN);
  Arguments arguments;
  CLI::App app{"Looks inside the region of a running or dead hicached, read-only."};
  app.set_version_flag("--version", hicache::version_text("hicache-dump"));
  auto* name = app.add_option("NAME", arguments.name, "name of the daemon");
  app.add_option("--file", arguments.file, "look at a copy of a region in this file")->excludes(name);
  app.add_flag("--json", arguments.json, "one JSON document instead of text");
  app.add_flag("--metrics", arguments.metrics, "counters and gauges in Prometheus' text format");
  app.add_flag("--pages", arguments.report.pages, "every page that is not free");
  app.add_flag("--index", arguments.report.index, "every chain of the prefix index");
  app.add_flag("--rings", arguments.report.rings, "ring positions of the clients");
  app.add_flag("--ranks", arguments.report.ranks, "groups, clients and leases");
  app.add_flag("--ops", arguments.report.operations, "the last operations, oldest first");
  app.add_flag("--check", arguments.check, "prove the invariants; exit 1 with the findings when one fails");
  app.footer(
      "Exit: 0 ok, 1 findings of --check, 2 damaged, unfinished or not a region, 3 made by another version,\n"
      "4 not found, 5 the tool could not do its work.");
  try {
    app.parse(argc, argv);
    if (arguments.name.empty() && arguments.file.empty()) throw CLI::RequiredError("NAME or --file");
    if (arguments.metrics && (arguments.json || arguments.check || arguments.report.any())) {
      throw CLI::ValidationError("--metrics", "stands alone: it prints counters only");
    }
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? kOk : kFailed;
  }
  try {
    return dump(arguments);
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "hicache-dump: not enough memory for a copy of the region\n");
  } catch (const std::exception& e) {
    std::fprintf(stderr, "hicache-dump: %s\n", e.what());
  }
  return kFailed;
}
