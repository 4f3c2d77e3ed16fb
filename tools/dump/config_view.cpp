#include "tools/dump/config_view.hpp"

#include "shm/protocol.hpp"
#include "tools/dump/snapshot.hpp"

namespace hicache::inspect {
namespace {

constexpr std::size_t kMaxConfigBytes = 1 << 20;
constexpr int kMaxDepth = 32;

// Printing JSON recurses: text of a hostile region must not decide how deep.
bool deeper_than_allowed(std::string_view text) {
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
      continue;
    }
    if (c == '"') in_string = true;
    if (c == '{' || c == '[') ++depth;
    if (c == '}' || c == ']') --depth;
    if (depth > kMaxDepth) return true;
  }
  return false;
}

std::uint32_t ring_entries(const nlohmann::ordered_json& config, const char* key) {
  if (!config.is_object() || !config.contains("limits")) return kMaxRingEntries;
  const auto& limits = config["limits"];
  if (!limits.is_object() || !limits.contains(key) || !limits[key].is_number_unsigned())
    return kMaxRingEntries;
  const auto value = limits[key].get<std::uint64_t>();
  return value >= 2 && value <= kMaxRingEntries ? static_cast<std::uint32_t>(value) : kMaxRingEntries;
}

}  // namespace

ConfigView view_config(const ConstTables& t) {
  ConfigView view;
  for (const A8& byte : t.config_text) {
    const auto c = static_cast<char>(get(byte));
    if (c == 0 || view.text.size() == kMaxConfigBytes) break;
    view.text.push_back(c);
  }
  if (!deeper_than_allowed(view.text)) {
    view.json = nlohmann::ordered_json::parse(view.text, nullptr, false);
    if (view.json.is_discarded()) view.json = nullptr;
  }
  view.submission_entries = ring_entries(view.json, "submission_entries");
  view.completion_entries = ring_entries(view.json, "completion_entries");
  return view;
}

std::string printable(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c < 0x20 || c >= 0x7f) c = '?';
  }
  return out;
}

std::string compact(const nlohmann::ordered_json& value) {
  return value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

}  // namespace hicache::inspect
