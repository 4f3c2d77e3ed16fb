// The keys of the configuration as a table: printing, parsing and reloading all walk it, so none can forget a
// key.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "daemon/config.hpp"

namespace hicache::daemon {

struct ConfigKey {
  std::string path;  // "section.key", or "key" at the top level
  bool reload = false;
  std::string expected;  // type and range, as a phrase for people
  std::function<nlohmann::ordered_json(const Config&)> get;
  // False when the value's type or range is wrong; the config is unchanged then.
  std::function<bool(Config&, const nlohmann::ordered_json&)> set;

  // "" for a key of the top level.
  [[nodiscard]] std::string section() const;
  [[nodiscard]] std::string leaf() const;
};

// Every key, in the order in which they are printed.
const std::vector<ConfigKey>& config_keys();

// Bytes as people write them: "64KiB", "3GiB", or plain digits where no unit divides them.
std::string format_bytes(std::uint64_t bytes);
// The reverse: digits with B, KiB, MiB, GiB, TiB or nothing behind them. Nothing when it is something else.
std::optional<std::uint64_t> parse_bytes(const std::string& text);

}  // namespace hicache::daemon
