#include <csignal>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "tests/support/processes.hpp"

namespace hicache::test {
namespace {
using nlohmann::json;
}  // namespace

TestDaemon::TestDaemon(const std::string& overrides)
    : name_(unique_region_name()),
      socket_path_(dir_.file("hicached.sock")),
      config_path_(dir_.file("hicached.json")) {
  const json base = {
      {"name", name_},
      {"socket", {{"path", socket_path_}}},
      {"pool", {{"bytes", "64MiB"}, {"segment_bytes", "1MiB"}}},
      {"log", {{"level", "debug"}}},
  };
  config_text_ = base.dump(2);
  write_config(overrides);
  try {
    start();
  } catch (...) {
    child_ = Child();
    remove_shm_leftovers(name_);
    throw;
  }
}

TestDaemon::~TestDaemon() {
  if (child_.valid()) {
    child_.kill(SIGTERM);
    child_.wait(10'000);
    child_ = Child();
  }
  remove_shm_leftovers(name_);
}

void TestDaemon::write_config(const std::string& overrides) {
  json config = json::parse(config_text_);
  config.merge_patch(json::parse(overrides));
  // A test that names the daemon or its socket itself is asked about it afterwards.
  name_ = config.at("name").get<std::string>();
  socket_path_ = config.at("socket").at("path").get<std::string>();
  config_text_ = config.dump(2);
  write_text(config_path_, config_text_);
}

int TestDaemon::stop() {
  child_.kill(SIGTERM);
  const auto status = child_.wait();
  return status.has_value() && status->signal == 0 ? status->code : -1;
}

void TestDaemon::kill9() {
  child_.kill(SIGKILL);
  child_.wait();
}

void TestDaemon::start() {
  child_ = Child::spawn({program("hicached"), "--config", config_path_, "--foreground"});
  const auto line = child_.read_line();
  if (!line.has_value() || line->find(" ready ") == std::string::npos) {
    const auto status = child_.wait(1000);
    throw std::runtime_error(
        "hicached did not become ready (" +
        (status ? "exit code " + std::to_string(status->code) : std::string("still running")) +
        "): " + line.value_or("") + "\n" + child_.error_text());
  }
  ready_line_ = *line;
}

}  // namespace hicache::test
