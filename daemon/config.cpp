#include "daemon/config.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string_view>
#include <system_error>

#include "daemon/config_keys.hpp"
#include "daemon/integrity/shard_checksums.hpp"
#include "shm/types.hpp"

namespace hicache::daemon {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::uint64_t kDefaultPageBytes = 16 * kKiB;
constexpr std::uint64_t kMaxDefaultPages = 4u << 20;
constexpr std::size_t kShownBytes = 80;

// The value as found, cut so that one fault stays one line.
std::string shown(const Json& value) {
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > kShownBytes) text = text.substr(0, kShownBytes) + "...";
  return text;
}

// Collects the faults of one document.
class ConfigReader {
 public:
  Config read(const Json& document) {
    if (!document.is_object()) {
      fault("the configuration: found " + shown(document) + ", expected an object");
      return config_;
    }
    for (const auto& [name, value] : document.items()) {
      if (const ConfigKey* key = find(name); key != nullptr && key->section().empty()) {
        set(*key, value);
      } else if (has_section(name)) {
        read_section(name, value);
      } else {
        fault(name + ": unknown key, expected one of " + names_in(""));
      }
    }
    if (faults_.empty()) {
      if (!given_.contains("pool.segment_bytes"))
        config_.pool.segment_bytes = default_segment_bytes(config_.pool.bytes);
      check_together();
    }
    return config_;
  }
  [[nodiscard]] const std::vector<std::string>& faults() const { return faults_; }
  void fault(std::string text) { faults_.push_back(std::move(text)); }

 private:
  void read_section(const std::string& section, const Json& object) {
    if (!object.is_object()) {
      fault(section + ": found " + shown(object) + ", expected an object");
      return;
    }
    for (const auto& [name, value] : object.items()) {
      const std::string path = section + "." + name;
      if (const ConfigKey* key = find(path)) {
        set(*key, value);
      } else {
        fault(path + ": unknown key, expected one of " + names_in(section));
      }
    }
  }

  void set(const ConfigKey& key, const Json& value) {
    given_.insert(key.path);
    if (!key.set(config_, value)) fault(key.path + ": found " + shown(value) + ", expected " + key.expected);
  }

  // Rules that concern two keys.
  void check_together() {
    auto require = [&](bool holds, const std::string& text) {
      if (!holds) fault(text);
    };
    const auto& l = config_.limits;
    require(l.completion_entries >= 2 * l.submission_entries,
            "limits.completion_entries: found " + std::to_string(l.completion_entries) +
                ", expected at least twice limits.submission_entries (" +
                std::to_string(l.submission_entries) + ")");
    require(l.max_deadline_ms >= l.operation_deadline_ms,
            "limits.max_deadline_ms: found " + std::to_string(l.max_deadline_ms) +
                ", expected at least limits.operation_deadline_ms (" +
                std::to_string(l.operation_deadline_ms) + ")");
    require(config_.pool.bytes >= config_.pool.segment_bytes,
            "pool.bytes: found " + format_bytes(config_.pool.bytes) +
                ", expected at least pool.segment_bytes (" + format_bytes(config_.pool.segment_bytes) + ")");
    const auto& i = config_.integrity;
    require(i.verify != VerifyPolicy::full || i.checksums == ChecksumPolicy::always,
            "integrity.verify: found \"full\", which needs integrity.checksums \"always\": a page without a "
            "checksum can't be verified");
    require(i.checksums == ChecksumPolicy::off || checksums_available(),
            "integrity.checksums: expected \"off\", because this hicached was built without xxHash");
    for (const std::uint32_t uid : config_.socket.read_only_uids) {
      const auto lists = [uid](const std::vector<std::uint32_t>& uids) {
        return std::find(uids.begin(), uids.end(), uid) != uids.end();
      };
      const auto only_here = [&](const std::vector<std::uint32_t>& uids, const std::string& key) {
        require(!lists(uids), "socket.read_only_uids: found " + std::to_string(uid) + ", which " + key +
                                  " has too: expected it in one of them");
      };
      only_here(config_.socket.allowed_uids, "socket.allowed_uids");
      only_here(config_.pool.map_uids, "pool.map_uids");
    }
    const auto& e = config_.eviction;
    require(e.low_watermark <= e.high_watermark || e.high_watermark == 0.0,
            "eviction.low_watermark: found " + Json(e.low_watermark).dump() +
                ", expected at most eviction.high_watermark (" + Json(e.high_watermark).dump() + ")");
  }

  static const ConfigKey* find(const std::string& path) {
    for (const ConfigKey& key : config_keys()) {
      if (key.path == path) return &key;
    }
    return nullptr;
  }
  static bool has_section(const std::string& name) {
    return std::any_of(config_keys().begin(), config_keys().end(),
                       [&](const ConfigKey& key) { return !name.empty() && key.section() == name; });
  }
  // Keys of a section; for the top level its keys and sections.
  static std::string names_in(const std::string& section) {
    std::string names;
    std::set<std::string> seen;
    for (const ConfigKey& key : config_keys()) {
      std::string name;
      if (key.section() == section) {
        name = key.leaf();
      } else if (section.empty()) {
        name = key.section();
      }
      if (name.empty() || !seen.insert(name).second) continue;
      names += (names.empty() ? "" : ", ") + name;
    }
    return names;
  }

  Config config_;
  std::set<std::string> given_;  // paths of the keys that the document has
  std::vector<std::string> faults_;
};

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += (text.empty() ? "" : "\n") + line;
  return text;
}

}  // namespace

std::uint64_t default_segment_bytes(std::uint64_t pool_bytes) {
  constexpr std::uint64_t kLeast = 4 * kMiB;
  constexpr std::uint64_t kMost = 256 * kMiB;
  return std::clamp(std::bit_ceil(pool_bytes / 256), kLeast, kMost);
}

std::uint32_t Config::page_table_entries() const {
  if (pool.max_pages != 0) return pool.max_pages;
  return static_cast<std::uint32_t>(
      std::clamp<std::uint64_t>(pool.bytes / kDefaultPageBytes, 1, kMaxDefaultPages));
}

Result<Config> parse_config(const std::string& json_text) {
  ConfigReader reader;
  // JSON lets a later duplicate win silently; a person who wrote a key twice should hear of it.
  std::vector<std::set<std::string>> seen;
  auto watch = [&](int, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) seen.emplace_back();
    if (event == Json::parse_event_t::object_end) seen.pop_back();
    if (event == Json::parse_event_t::key && !seen.back().insert(parsed.get<std::string>()).second) {
      reader.fault(parsed.get<std::string>() + ": found twice, expected once");
    }
    return true;
  };
  Json document;
  try {
    document = Json::parse(json_text, watch);
  } catch (const Json::exception& e) {
    // Without the parser's own "[json.exception...] " in front.
    const std::string_view what = e.what();
    const auto bracket = what.find("] ");
    const std::string_view why = bracket == std::string_view::npos ? what : what.substr(bracket + 2);
    return Error{Status::invalid_argument, "the configuration is not JSON: " + std::string(why), 0};
  }
  Config config = reader.read(document);
  if (!reader.faults().empty()) return Error{Status::invalid_argument, joined(reader.faults()), 0};
  return config;
}

Result<Config> load_config(const std::string& path) {
  std::error_code ignored;  // opening the file says what is wrong
  if (std::filesystem::is_directory(path, ignored)) {
    return Error{Status::invalid_argument, "cannot read configuration " + path + ": it is a directory",
                 EISDIR};
  }
  std::ifstream in(path, std::ios::binary);
  if (!in) {
    const int code = errno;
    return Error{Status::not_found, "cannot read configuration " + path + ": " + std::strerror(code), code};
  }
  std::ostringstream text;
  text << in.rdbuf();
  auto config = parse_config(text.str());
  if (!config) return Error{config.status(), path + ":\n" + config.error().message, 0};
  return config;
}

std::string config_to_json(const Config& config) {
  Json document = Json::object();
  for (const ConfigKey& key : config_keys()) {
    Json& home = key.section().empty() ? document : document[key.section()];
    home[key.leaf()] = key.get(config);
  }
  return document.dump(2);
}

Outcome apply_reload(Config& current, const Config& next) {
  std::vector<std::string> refused;
  for (const ConfigKey& key : config_keys()) {
    const Json before = key.get(current);
    const Json after = key.get(next);
    if (before != after && !key.reload) {
      refused.push_back(key.path + ": " + shown(before) + " can't become " + shown(after) +
                        " without a restart of the daemon");
    }
  }
  if (!refused.empty()) return Error{Status::invalid_argument, joined(refused), 0};
  for (const ConfigKey& key : config_keys()) {
    if (key.reload && !key.set(current, key.get(next))) {
      return Error{Status::invalid_argument, key.path + ": expected " + key.expected, 0};
    }
  }
  return success();
}

}  // namespace hicache::daemon
