// Which planted fault is awake in this process (tests/support/plant_faults.cmake).
#pragma once

#include <string>
#include <utility>

namespace hicache::test {

// Set before the process has threads; children by fork have it too.
inline std::string& awake_fault() {
  static std::string name;
  return name;
}

inline bool planted_fault(const char* name) {
  return awake_fault() == name;
}

// Wakes one fault as long as it lives.
class PlantedFault {
 public:
  explicit PlantedFault(std::string name) { awake_fault() = std::move(name); }
  ~PlantedFault() { awake_fault().clear(); }
  PlantedFault(const PlantedFault&) = delete;
  PlantedFault& operator=(const PlantedFault&) = delete;
};

}  // namespace hicache::test
