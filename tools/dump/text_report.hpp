// The report for people.
#pragma once

#include <string>

#include "tools/dump/output.hpp"
#include "tools/dump/region_check.hpp"
#include "tools/dump/report_options.hpp"
#include "tools/dump/snapshot.hpp"

namespace hicache::inspect {

// First line: the verdict. Then everything asked for that the snapshot holds.
void write_text(Output& out, const Snapshot& snapshot, const std::string& what, const ReportOptions& options);
// Last lines: what --check found.
void write_check(Output& out, const CheckReport& report);

}  // namespace hicache::inspect
