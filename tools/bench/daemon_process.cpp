#include "tools/bench/daemon_process.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "libhicache/include/hicache/client.hpp"
#include "shm/clock.hpp"

namespace hicache::bench {
namespace {

constexpr std::uint32_t kStartTimeoutMs = 60'000;  // a big pool takes time to reserve
constexpr std::uint32_t kStopTimeoutMs = 60'000;

std::string socket_path_of(const nlohmann::json& config) {
  const auto socket = config.find("socket");
  if (socket != config.end() && socket->is_object()) {
    std::string path = socket->value("path", "");
    if (!path.empty()) return path;
  }
  return default_socket_path(config.value("name", "default"));
}

}  // namespace

Result<nlohmann::json> read_config_json(const std::string& path) {
  std::ifstream in(path);
  if (!in) {
    const int error = errno;
    return Error{Status::not_found, fmt::format("config {}: {}", path, std::strerror(error)), error};
  }
  auto json = nlohmann::json::parse(in, nullptr, false);
  if (!json.is_object()) {
    return Error{Status::invalid_argument, fmt::format("config {}: expected a JSON object", path), 0};
  }
  // What is read or changed here; the daemon checks the rest.
  for (const char* section : {"socket", "pool", "eviction"}) {
    if (json.contains(section) && !json[section].is_object()) {
      return Error{
          Status::invalid_argument,
          fmt::format("config {}: {}: found {}, expected an object", path, section, json[section].dump()), 0};
    }
  }
  for (const char* text : {"/name", "/socket/path"}) {
    const nlohmann::json::json_pointer at(text);
    if (json.contains(at) && !json[at].is_string()) {
      return Error{Status::invalid_argument,
                   fmt::format("config {}: {}: found {}, expected text", path, text, json[at].dump()), 0};
    }
  }
  return json;
}

Result<std::unique_ptr<DaemonProcess>> DaemonProcess::start(const nlohmann::json& config, int cpu) {
  auto program = sibling_program("hicached");
  if (!program) return program.error();
  std::unique_ptr<DaemonProcess> daemon(new DaemonProcess());
  daemon->name_ = config.value("name", "default");
  daemon->socket_path_ = socket_path_of(config);
  if (control(daemon->socket_path_, {"status"}, 1000)) {
    return Error{
        Status::exists,
        fmt::format("a daemon called \"{}\" runs already: stop it, or use it with --attach", daemon->name_),
        0};
  }
  std::string directory = (std::filesystem::temp_directory_path() / "hicache-bench-XXXXXX").string();
  if (::mkdtemp(directory.data()) == nullptr) {
    const int error = errno;
    return Error{Status::system_error, fmt::format("{}: {}", directory, std::strerror(error)), error};
  }
  daemon->directory_ = directory;
  const std::string config_path = directory + "/config.json";
  {
    std::ofstream out(config_path);
    out << config.dump(2) << '\n';
    if (!out.flush()) return Error{Status::system_error, fmt::format("{}: writing failed", config_path), EIO};
  }
  daemon->program_ = *program;
  daemon->cpu_ = cpu;
  if (Outcome spawned = daemon->spawn(); !spawned) return spawned.error();
  if (Outcome answered = daemon->await_answer(); !answered) return answered.error();
  return daemon;
}

Outcome DaemonProcess::spawn() {
  auto log = CapturedOutput::create();
  if (!log) return log.error();
  ChildProcess::Program run;
  run.arguments = {program_, "--config", directory_ + "/config.json", "--foreground"};
  run.output_fd = log->fd();
  run.cpu = cpu_;
  auto process = ChildProcess::start(run);
  if (!process) return process.error();
  process_ = std::move(*process);
  log_.emplace(std::move(*log));
  return success();
}

Outcome DaemonProcess::await_answer() {
  const std::uint64_t end = monotonic_ns() + std::uint64_t{kStartTimeoutMs} * 1'000'000;
  while (!control(socket_path_, {"status"}, 1000)) {
    if (const auto ended = process_.wait(20)) {
      return Error{Status::daemon_absent,
                   fmt::format("hicached exited with status {}:\n{}", *ended, log_->tail()), 0};
    }
    if (monotonic_ns() > end) {
      return Error{Status::timed_out,
                   fmt::format("hicached did not answer within {} ms:\n{}", kStartTimeoutMs, log_->tail()),
                   0};
    }
  }
  return success();
}

Result<std::unique_ptr<DaemonProcess>> DaemonProcess::attach(const nlohmann::json& config) {
  std::unique_ptr<DaemonProcess> daemon(new DaemonProcess());
  daemon->name_ = config.value("name", "default");
  daemon->socket_path_ = socket_path_of(config);
  const auto status = control(daemon->socket_path_, {"status"});
  if (!status) return status.error();
  return daemon;
}

DaemonProcess::~DaemonProcess() {
  static_cast<void>(stop());
  std::error_code ignored;
  if (!directory_.empty()) std::filesystem::remove_all(directory_, ignored);
}

Result<DaemonCounters> DaemonProcess::counters() const {
  const auto text = control(socket_path_, {"status"});
  if (!text) return text.error();
  const auto json = nlohmann::json::parse(*text, nullptr, false);
  if (!json.is_object() || !json.contains("counters") || !json["counters"].is_object()) {
    return Error{Status::corrupt, fmt::format("the daemon's status has no \"counters\": {}", *text), 0};
  }
  DaemonCounters counters;
  for (const auto& [name, value] : json["counters"].items()) {
    if (value.is_number_unsigned()) counters[name] = value.get<std::uint64_t>();
  }
  return counters;
}

Outcome DaemonProcess::kill() {
  process_.signal(SIGKILL);
  const auto status = process_.wait(kStopTimeoutMs);
  if (!status) return status.error();
  process_ = ChildProcess();
  return success();
}

void DaemonProcess::signal(int number) const {
  process_.signal(number);
}

Outcome DaemonProcess::stop() {
  if (process_.pid() < 0) return success();
  process_.signal(SIGTERM);
  const auto status = process_.wait(kStopTimeoutMs);
  const std::string log = log_->tail();
  process_ = ChildProcess();
  if (!status) return status.error();
  if (*status != 0) {
    return Error{Status::internal, fmt::format("hicached exited with status {}:\n{}", *status, log), 0};
  }
  return success();
}

}  // namespace hicache::bench
