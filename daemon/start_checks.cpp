#include "daemon/start_checks.hpp"

#include <spdlog/spdlog.h>

#include <string>
#include <utility>

#include "shm/machine/checks.hpp"

namespace hicache::daemon {
namespace {

void log_degraded(const machine::Check& check) {
  if (check.level == machine::Level::degraded) spdlog::warn("start check, {}", machine::sentence(check));
}

}  // namespace

Outcome check_start(const machine::Needs& needs, const machine::Probes& probes) {
  std::string refusals;
  for (const machine::Check& check : machine::examine(needs, machine::measure(needs, probes))) {
    log_degraded(check);
    if (check.level == machine::Level::refused)
      refusals += (refusals.empty() ? "" : "\n") + machine::sentence(check);
  }
  if (refusals.empty()) return success();
  return Error{Status::system_error, refusals, 0};
}

GpuCheck::GpuCheck(const machine::Needs& needs) {
  machine::Machine machine;
  machine.nvidia_driver = machine::has_nvidia_driver("");
  if (needs.gpus == machine::GpuNeed::none) return;
  if (!machine.nvidia_driver) {
    log_degraded(machine::check_gpus(needs, machine));
    return;
  }
  thread_ = std::thread([needs, machine]() mutable {
    machine::measure_gpus(machine::Probes::real(), machine);
    log_degraded(machine::check_gpus(needs, machine));
  });
}

GpuCheck::~GpuCheck() {
  if (thread_.joinable()) thread_.join();
}

}  // namespace hicache::daemon
