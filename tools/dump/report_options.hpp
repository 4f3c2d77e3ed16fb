// What the user asked to see.
#pragma once

namespace hicache::inspect {

struct ReportOptions {
  bool pages = false;
  bool index = false;
  bool rings = false;
  bool ranks = false;
  bool operations = false;

  [[nodiscard]] bool any() const { return pages || index || rings || ranks || operations; }
};

}  // namespace hicache::inspect
