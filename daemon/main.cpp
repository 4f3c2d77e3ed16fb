// hicached: reads its configuration, serves until SIGTERM, drains, exits 0.
#include <sys/signalfd.h>
#include <unistd.h>

#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <optional>
#include <string>

#include "daemon/config.hpp"
#include "daemon/needs.hpp"
#include "daemon/service.hpp"
#include "daemon/start_checks.hpp"
#include "daemon/startup.hpp"
#include "shm/version.hpp"

namespace hicache::daemon {
namespace {

constexpr int kExitFailure = 1;  // the daemon could not start
constexpr int kExitUsage = 2;    // command line or configuration
constexpr std::uint32_t kDrainMs = 10'000;

struct CommandLine {
  std::string config_path;
  bool check_config = false;
  bool print_config = false;
  bool print_needs = false;
  bool foreground = false;
  bool fresh = false;
};

int fail(int code, const std::string& text) {
  std::fprintf(stderr, "hicached: %s\n", text.c_str());
  return code;
}

// Serves until a signal asks for the end.
void wait_for_end(int signals, Service& service, const std::string& config_path) {
  for (;;) {
    signalfd_siginfo info{};
    const ssize_t n = ::read(signals, &info, sizeof info);
    if (n < 0 && errno == EINTR) continue;
    if (n != sizeof info) {
      spdlog::error("cannot read signals any more: stopping");
      return;
    }
    if (info.ssi_signo != static_cast<std::uint32_t>(SIGHUP)) {
      spdlog::info("signal {}: draining", info.ssi_signo);
      return;
    }
    service.reload(config_path);
  }
}

int serve(const Config& config, const CommandLine& line, const std::string& config_path,
          std::optional<Detachment> detachment) {
  auto signals = capture_signals();
  if (!signals) return fail(kExitFailure, signals.error().message);
  if (auto logging = configure_logging(config.log); !logging)
    return fail(kExitFailure, logging.error().message);
  raise_limits();
  keep_freed_memory();
  const machine::Needs needs = needs_of(config);
  if (auto checked = check_start(needs); !checked) {
    spdlog::critical("this machine can't run daemon '{}':\n{}", config.name, checked.error().message);
    return config.log.file.empty() ? kExitFailure : fail(kExitFailure, checked.error().message);
  }
  auto service =
      Service::start(config, line.fresh ? RegionOwner::Start::fresh : RegionOwner::Start::take_over);
  if (!service) {
    spdlog::critical("{}", service.error().message);
    // A log file is not where whoever starts the daemon looks first.
    if (!config.log.file.empty()) return fail(kExitFailure, service.error().message);
    return kExitFailure;
  }
  Service& running = **service;
  std::printf("hicached %s ready socket=%s pool=%llu pages=%zu\n", config.name.c_str(),
              running.socket_path().c_str(), static_cast<unsigned long long>(running.pool_bytes()),
              running.pages());
  std::fflush(stdout);
  if (detachment) detachment->ready();
  notify_service_manager("READY=1\nMAINPID=" + std::to_string(::getpid()));
  spdlog::info("daemon '{}' is ready at {}", config.name, running.socket_path());
  const GpuCheck gpus(needs);

  wait_for_end(signals->get(), running, config_path);
  notify_service_manager("STOPPING=1");
  running.drain(kDrainMs);
  service->reset();
  spdlog::info("daemon '{}' has stopped", config.name);
  return 0;
}

int run(const CommandLine& line) {
  Config config;
  std::string path;
  if (!line.config_path.empty()) {
    path = std::filesystem::absolute(line.config_path).string();
    auto loaded = load_config(path);
    if (!loaded) return fail(kExitUsage, loaded.error().message);
    config = *loaded;
  }
  if (line.print_config) {
    std::printf("%s\n", config_to_json(config).c_str());
    return 0;
  }
  if (line.print_needs) {
    std::fputs(machine::needs_to_text(needs_of(config)).c_str(), stdout);
    return 0;
  }
  if (path.empty()) return fail(kExitUsage, "--config FILE is required (--print-config shows the defaults)");
  if (line.check_config) {
    std::printf("%s: ok\n", path.c_str());
    return 0;
  }
  std::optional<Detachment> detachment;
  if (!line.foreground) {
    auto detached = Detachment::detach();
    if (!detached) return fail(kExitFailure, detached.error().message);
    detachment = std::move(*detached);
  }
  return serve(config, line, path, std::move(detachment));
}

int start(int argc, char** argv) {
  CommandLine line;
  CLI::App app{"hicached: the KV cache daemon of a node"};
  app.set_version_flag("--version", version_text("hicached"));
  app.add_option("--config", line.config_path, "configuration file (JSON)");
  app.add_flag("--check-config", line.check_config, "check the configuration file and exit");
  app.add_flag("--print-config", line.print_config,
               "print every key with its value (the default without --config) and exit");
  app.add_flag("--print-needs", line.print_needs,
               "print what the configuration (without --config: the defaults) needs from the machine and "
               "exit; hicache-ctl doctor asks this");
  app.add_flag("--foreground", line.foreground, "stay attached to the terminal; else detach once ready");
  app.add_flag("--fresh", line.fresh,
               "drop the pages that an earlier daemon of this name left, instead of taking them over");
  app.footer(
      "Exit status: 0 started and detached, or ended in order; 1 could not start; 2 wrong command line or "
      "configuration.");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : kExitUsage;
  }
  try {
    return run(line);
  } catch (const std::exception& e) {
    return fail(kExitFailure, e.what());
  }
}

}  // namespace
}  // namespace hicache::daemon

int main(int argc, char** argv) {
  return hicache::daemon::start(argc, argv);
}
