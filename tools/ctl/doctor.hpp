// hicache-ctl doctor: runs a daemon's start checks (shm/machine/checks.hpp) without starting one, and shows
// them all.
#pragma once

#include <string>
#include <vector>

#include "shm/machine/checks.hpp"
#include "shm/machine/needs.hpp"
#include "shm/status.hpp"

namespace hicache::ctl {

std::string doctor_text(const std::vector<machine::Check>& checks);
std::string doctor_json(const std::vector<machine::Check>& checks);
// 1 when a check refuses the start, else 0.
int doctor_exit_code(const std::vector<machine::Check>& checks);

// What hicached needs with a configuration ("" = the defaults), as `hicached --print-needs` says. `program`
// "" = the hicached beside this program, or else of PATH. invalid_argument when hicached refuses the
// configuration: it has said why on standard error. daemon_absent when there is none to ask.
Result<machine::Needs> ask_needs(const std::string& program, const std::string& config_path);

// hicache-ctl doctor [--config FILE] [--json]; `argv` begins with the word doctor.
int run_doctor(int argc, const char* const* argv);

}  // namespace hicache::ctl
