// The daemon's JSON answers as text for people.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace hicache::ctl {

// `command` is the first word of the question. An answer without a form of its own is shown as indented JSON.
std::string render(const std::string& command, const nlohmann::json& answer);

// Replaces what could steer a terminal: an answer may carry text that clients chose.
std::string printable(const std::string& text);

}  // namespace hicache::ctl
