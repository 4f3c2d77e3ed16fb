// What the user asked to see.
#pragma once

namespace hicache::inspect {

struct ReportOptions {
  bool pages = false;
  bool index = false;
  bool rings = false;
  bool ranks = false;
  bool operations = false;
};

}  // namespace hicache::inspect
