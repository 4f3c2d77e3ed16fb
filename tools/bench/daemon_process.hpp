// A daemon for the benchmark: one of its own with a generated configuration, or one that runs already.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "shm/status.hpp"
#include "tools/bench/child_process.hpp"

namespace hicache::bench {

// The daemon's counters by name.
using DaemonCounters = std::map<std::string, std::uint64_t>;

class DaemonProcess {
 public:
  // Starts `hicached` from beside this program and waits until it answers. The config must hold "name"; fails
  // with the end of the daemon's log when it does not come up.
  static Result<std::unique_ptr<DaemonProcess>> start(const nlohmann::json& config, int cpu = -1);
  // Uses the daemon that the config names, which must answer.
  static Result<std::unique_ptr<DaemonProcess>> attach(const nlohmann::json& config);
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;
  // Stops an own daemon and removes its temporary files.
  ~DaemonProcess();

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const std::string& socket_path() const { return socket_path_; }
  // Process id of an own daemon, -1 otherwise.
  [[nodiscard]] pid_t pid() const { return process_.pid(); }

  [[nodiscard]] Result<DaemonCounters> counters() const;
  // SIGKILL, and the wait for its end. Its shared memory stays, for the next one.
  Outcome kill();
  // Starts an own daemon again after kill(), without waiting until it answers.
  Outcome spawn();
  // Waits until an own daemon answers.
  Outcome await_answer();
  void signal(int number) const;
  // SIGTERM and wait; an error unless it exits 0. Nothing to do for a daemon that is not ours.
  Outcome stop();

 private:
  DaemonProcess() = default;

  std::string name_;
  std::string socket_path_;
  std::string program_;
  int cpu_ = -1;
  std::string directory_;  // temporary, of an own daemon: its config
  std::optional<CapturedOutput> log_;
  ChildProcess process_;
};

// Reads a config file for patching. Errors name the file.
Result<nlohmann::json> read_config_json(const std::string& path);

}  // namespace hicache::bench
