#include "daemon/storage/redis/settings.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string_view>

namespace hicache::daemon::redis {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::uint32_t kMaxTtlSeconds = 366 * 24 * 3600;
constexpr std::size_t kMaxPrefixBytes = 64;
constexpr std::size_t kMaxEndpoints = 64;
constexpr std::size_t kMaxCredentialBytes = 512;
constexpr std::string_view kKeys =
    "endpoints, cluster, user, password, password_file, database, key_prefix, ttl_s, threads, connections, "
    "depth, "
    "connect_timeout_ms, response_timeout_ms, reconnect_max_ms";

class SettingsReader {
 public:
  explicit SettingsReader(const Json& json) : json_(json) {}

  Result<Settings> read() {
    if (!json_.is_object()) return Error{Status::invalid_argument, "expected an object", 0};
    for (const auto& [name, value] : json_.items()) read_key(name, value);
    if (!json_.contains("endpoints")) add_endpoint("127.0.0.1:6379");
    if (faults_.empty()) check_together();
    if (!faults_.empty()) return Error{Status::invalid_argument, faults_, 0};
    return settings_;
  }

 private:
  void read_key(const std::string& name, const Json& value) {
    if (name == "endpoints") return read_endpoints(value);
    if (name == "cluster") return read_boolean(name, value, settings_.cluster);
    if (name == "user") return read_user(value);
    if (name == "password") return read_password(value);
    if (name == "password_file") return read_password_file(value);
    if (name == "database") return read_number(name, value, 0, 1'000'000, settings_.database);
    if (name == "key_prefix") return read_prefix(value);
    if (name == "ttl_s") {
      std::uint32_t seconds = 0;
      read_number(name, value, 0, kMaxTtlSeconds, seconds);
      settings_.ttl_ms = std::uint64_t{seconds} * 1000;
      return;
    }
    if (name == "threads") return read_number(name, value, 1, 16, settings_.threads);
    if (name == "connections") return read_number(name, value, 1, 64, settings_.connections);
    if (name == "depth") return read_number(name, value, 1, 128, settings_.depth);
    if (name == "connect_timeout_ms") {
      return read_number(name, value, 10, 60'000, settings_.connect_timeout_ms);
    }
    if (name == "response_timeout_ms") {
      return read_number(name, value, 10, 600'000, settings_.response_timeout_ms);
    }
    if (name == "reconnect_max_ms") return read_number(name, value, 10, 60'000, settings_.reconnect_max_ms);
    // Without its value, which may be a misspelt key's secret.
    fault(name, "unknown key, expected one of " + std::string(kKeys));
  }

  void read_endpoints(const Json& value) {
    if (!value.is_array() || value.empty() || value.size() > kMaxEndpoints) {
      return fault("endpoints", value,
                   "a list of 1 to " + std::to_string(kMaxEndpoints) +
                       " texts such as \"10.0.0.1:6379\" or \"unix:/run/redis.sock\"");
    }
    for (const Json& one : value) {
      if (!one.is_string()) {
        fault("endpoints", one, "a text such as \"10.0.0.1:6379\" or \"unix:/run/redis.sock\"");
      } else {
        add_endpoint(one.get<std::string>());
      }
    }
  }

  void add_endpoint(const std::string& text) {
    auto endpoint = make_endpoint(text, Names::look_up);
    if (!endpoint) return fault("endpoints", "found \"" + text + "\": " + endpoint.error().message);
    settings_.endpoints.push_back(std::move(*endpoint));
  }

  void read_user(const Json& value) {
    if (!value.is_string() || !is_credential(value.get_ref<const std::string&>())) {
      return fault("user", value, "a name of at most 512 bytes");
    }
    settings_.user = value.get<std::string>();
  }

  // No message shows it.
  void read_password(const Json& value) {
    if (!value.is_string() || !is_credential(value.get_ref<const std::string&>())) {
      return fault("password", "expected a text of at most 512 bytes");
    }
    settings_.password = value.get<std::string>();
  }

  // The first line of the file. No message shows it.
  void read_password_file(const Json& value) {
    if (!value.is_string()) return fault("password_file", value, "the path of a file");
    const auto path = value.get<std::string>();
    if (path.empty()) return;
    std::ifstream in(path, std::ios::binary);
    std::string line;
    errno = 0;
    if (!in || !std::getline(in, line)) {
      return fault("password_file", "can't read a line from " + path + ": " +
                                        (errno != 0 ? std::strerror(errno) : "the file is empty"));
    }
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty() || !is_credential(line)) {
      return fault("password_file", "the first line of " + path + " is not a password of 1 to 512 bytes");
    }
    settings_.password = std::move(line);
  }

  // Letters that mean nothing in a pattern of SCAN and in a hash tag of a cluster.
  void read_prefix(const Json& value) {
    const auto allowed = [](char c) {
      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
             c == '_' || c == '-' || c == ':';
    };
    if (value.is_string()) {
      const auto& text = value.get_ref<const std::string&>();
      if (!text.empty() && text.size() <= kMaxPrefixBytes && std::all_of(text.begin(), text.end(), allowed)) {
        settings_.key_prefix = text;
        return;
      }
    }
    fault("key_prefix", value, "1 to 64 letters, digits and . _ - :");
  }

  void read_boolean(const std::string& name, const Json& value, bool& target) {
    if (!value.is_boolean()) return fault(name, value, "true or false");
    target = value.get<bool>();
  }

  void read_number(const std::string& name, const Json& value, std::uint32_t low, std::uint32_t high,
                   std::uint32_t& target) {
    const bool natural =
        value.is_number_unsigned() || (value.is_number_integer() && value.get<std::int64_t>() >= 0);
    if (!natural || value.get<std::uint64_t>() < low || value.get<std::uint64_t>() > high) {
      return fault(name, value, "an integer from " + std::to_string(low) + " to " + std::to_string(high));
    }
    target = value.get<std::uint32_t>();
  }

  // Rules that concern two keys.
  void check_together() {
    if (!settings_.cluster && settings_.endpoints.size() > 1) {
      fault("endpoints", "found " + std::to_string(settings_.endpoints.size()) +
                             " servers, expected 1 unless cluster is true");
    }
    if (settings_.cluster && settings_.database != 0) {
      fault("database", "found " + std::to_string(settings_.database) + ", a cluster has only database 0");
    }
    if (settings_.connections < settings_.threads) {
      fault("connections", "found " + std::to_string(settings_.connections) +
                               ", expected at least threads (" + std::to_string(settings_.threads) + ")");
    }
    if (json_.contains("password") && json_.contains("password_file")) {
      fault("password_file", "expected either password or password_file");
    }
    if (!settings_.user.empty() && settings_.password.empty()) {
      fault("user", "found \"" + settings_.user + "\" without a password");
    }
    for (const Endpoint& endpoint : settings_.endpoints) {
      if (settings_.cluster && endpoint.address.ss_family == AF_UNIX) {
        fault("endpoints", "found \"" + endpoint.text + "\": the nodes of a cluster are reached over TCP");
      }
    }
  }

  static bool is_credential(std::string_view text) {
    return text.size() <= kMaxCredentialBytes && text.find('\0') == std::string_view::npos;
  }

  void fault(const std::string& key, const Json& found, const std::string& expected) {
    std::string text = found.dump(-1, ' ', true, Json::error_handler_t::replace);
    if (text.size() > 80) text = text.substr(0, 80) + "...";
    fault(key, "found " + text + ", expected " + expected);
  }
  void fault(const std::string& key, const std::string& text) {
    faults_ += (faults_.empty() ? "" : "; ") + ("storage.redis." + key) + ": " + text;
  }

  const Json& json_;
  Settings settings_;
  std::string faults_;
};

}  // namespace

Result<Settings> parse_settings(const Json& settings) {
  return SettingsReader(settings).read();
}

}  // namespace hicache::daemon::redis
