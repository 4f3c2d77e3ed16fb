// Which GPU a rank process sees.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

namespace hicache::bench {

// Hides all GPUs but one from the CUDA driver, as engines' launchers do: the process knows it as device 0.
// Takes the entry of CUDA_VISIBLE_DEVICES where that is set. Must be called before the driver is loaded.
inline void see_only_gpu(std::uint32_t index) {
  std::string chosen = std::to_string(index);
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES"); visible != nullptr && *visible != '\0') {
    std::vector<std::string> entries;
    std::istringstream list(visible);
    for (std::string entry; std::getline(list, entry, ',');) entries.push_back(entry);
    // An entry that is not there shows no GPU, and the rank says so.
    chosen = index < entries.size() ? entries[index] : "-1";
  }
  ::setenv("CUDA_VISIBLE_DEVICES", chosen.c_str(), 1);
}

}  // namespace hicache::bench
