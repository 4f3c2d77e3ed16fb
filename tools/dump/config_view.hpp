// The configuration text that the daemon left in the region, made safe to show.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "shm/region.hpp"

namespace hicache::inspect {

struct ConfigView {
  std::string text;             // as found up to the first zero byte
  nlohmann::ordered_json json;  // null when the text is not JSON of reasonable depth
  // Bounds for ring positions: from the configuration, else the layout's limits.
  std::uint32_t submission_entries = 0;
  std::uint32_t completion_entries = 0;
};
ConfigView view_config(const ConstTables& t);

// Bytes outside printable ASCII become '?', so that a hostile region can't write to a terminal.
std::string printable(std::string_view text);
// Compact JSON, plain ASCII.
std::string compact(const nlohmann::ordered_json& value);

}  // namespace hicache::inspect
