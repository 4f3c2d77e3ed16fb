// What --version prints: the release, and what decides whether two programs understand each other.
#pragma once

#include <string>

namespace hicache {

// "PROGRAM 0.1.0 (protocol 1 to 1, layout 1.0)"
std::string version_text(const std::string& program);

}  // namespace hicache
