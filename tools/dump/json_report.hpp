// The report for programs: one JSON document with the same content as the text.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "tools/dump/region_check.hpp"
#include "tools/dump/report_options.hpp"
#include "tools/dump/snapshot.hpp"

namespace hicache::inspect {

// `check` may be null.
nlohmann::ordered_json to_json(const Snapshot& snapshot, const std::string& what,
                               const ReportOptions& options, const CheckReport* check);

}  // namespace hicache::inspect
