// What the figures were measured on.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace hicache::bench {

struct Machine {
  std::string cpu;
  std::string kernel;
  std::uint32_t cores = 0;  // that this process may use

  static Machine here();
  [[nodiscard]] std::string text() const;
  [[nodiscard]] nlohmann::json json() const;
};

}  // namespace hicache::bench
