// hicache-ctl NAME COMMAND...: asks a running daemon over its socket and shows the answer.
#include <sys/types.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "hicache/client.hpp"
#include "shm/region.hpp"
#include "shm/shared_memory.hpp"
#include "shm/socket_path.hpp"
#include "shm/version.hpp"
#include "tools/ctl/doctor.hpp"
#include "tools/ctl/hash.hpp"
#include "tools/ctl/tables.hpp"

namespace hicache::ctl {
namespace {

constexpr int kExitRefused = 1;      // the daemon answered with an error
constexpr int kExitUsage = 2;        // the command line is wrong
constexpr int kExitUnreachable = 3;  // no daemon, no answer in time, or another protocol

constexpr const char* kCommands =
    "Commands:\n"
    "  status                 pool, pages and counters\n"
    "  ranks                  attached clients\n"
    "  namespaces             known namespaces and their pages\n"
    "  clear                  evict every page that is not in use\n"
    "  evict N                evict up to N pages, least valuable first\n"
    "  evict-client N         cut off client N of 'ranks', such as one that is stopped or hangs\n"
    "  config                 the configuration in force\n"
    "  storage status         backend, health, queues, circuit breaker, latency and bandwidth\n"
    "  storage attach [NAME [SETTINGS]]  attach the configured storage backend, or another\n"
    "  storage detach         go on without storage\n"
    "  storage clear          empty storage\n"
    "  storage sync           wait until no backup waits or runs\n"
    "  namespace bump PREFIX  raise the weights epoch of the namespaces whose base digest starts with "
    "PREFIX\n"
    "                         (at least 8 hex digits): their pages become unreachable\n"
    "\n"
    "hicache-ctl doctor [--config FILE] [--json] asks no daemon: it says what one will meet on this "
    "machine.\n"
    "hicache-ctl hash --page-size P --tokens 1,2,... asks none either: the hashes of a prompt's pages and\n"
    "their names in storage backends.\n"
    "\n"
    "Exit status: 0 done, 1 refused by the daemon, 2 wrong command line, 3 no answer from a daemon.";

// The running daemon's own word about its socket, or the default place. `hidden` is set when a daemon's word
// is there but only for other users.
std::string socket_of(const std::string& name, bool& hidden) {
  const auto fd = open_named(control_object_name(name), Mapping::Access::read_only);
  hidden = !fd && fd.error().system_errno == EACCES;
  if (!fd) return default_socket_path(name);
  alignas(RegionHeader) std::uint8_t bytes[sizeof(RegionHeader)];
  const auto size = object_size(fd->get());
  if (!size || ::pread(fd->get(), bytes, sizeof bytes, 0) != static_cast<ssize_t>(sizeof bytes) ||
      check_header(bytes, *size).verdict != RegionVerdict::usable) {
    return default_socket_path(name);
  }
  return load_text(reinterpret_cast<const RegionHeader*>(bytes)->socket_path);
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

// The daemon's errors are JSON objects, those of the way to it are sentences.
std::string error_text(const Error& error) {
  const auto parsed = nlohmann::json::parse(error.message, nullptr, false);
  if (parsed.is_object() && parsed.contains("error") && parsed["error"].is_string()) {
    return parsed["error"].get<std::string>();
  }
  return error.message;
}

int exit_code(Status status) {
  switch (status) {
    case Status::daemon_absent:
    case Status::daemon_lost:
    case Status::timed_out:
    case Status::version_mismatch:
    case Status::system_error:
    case Status::corrupt:
      return kExitUnreachable;
    default:
      return kExitRefused;
  }
}

int start(int argc, char** argv) {
  std::string name;
  std::string socket_path;
  std::vector<std::string> command;
  bool raw_json = false;
  std::uint32_t timeout_ms = 10'000;
  CLI::App app{"hicache-ctl: asks a running hicached"};
  app.set_version_flag("--version", version_text("hicache-ctl"));
  app.add_option("NAME", name, "name of the daemon")->required();
  app.add_option("COMMAND", command, "what to ask, see below")->required();
  app.add_option("--socket", socket_path, "path of the daemon's socket (looked up by name unless given)");
  app.add_flag("--json", raw_json, "print the daemon's JSON answer as it is");
  app.add_option("--timeout-ms", timeout_ms, "how long to wait for the answer")
      ->check(CLI::Range(1u, 86'400'000u));
  app.footer(kCommands);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : kExitUsage;
  }
  if (!valid_region_name(name)) {
    std::fprintf(stderr, "hicache-ctl: '%s' is no daemon's name: expected 1 to 48 of A-Z a-z 0-9 . _ -\n",
                 printable(name).c_str());
    return kExitUsage;
  }
  bool hidden = false;
  if (socket_path.empty()) socket_path = socket_of(name, hidden);
  const auto answer = control(socket_path, command, timeout_ms);
  if (!answer) {
    std::fprintf(stderr, "hicache-ctl: %s: %s (%s)\n", joined(command).c_str(),
                 printable(error_text(answer.error())).c_str(),
                 std::string(to_string(answer.status())).c_str());
    if (hidden && answer.status() == Status::daemon_absent) {
      std::fprintf(
          stderr,
          "hicache-ctl: '%s' is a daemon of another user: give the path of its socket with --socket\n",
          name.c_str());
    }
    return exit_code(answer.status());
  }
  const auto parsed = nlohmann::json::parse(*answer, nullptr, false);
  // The configuration is for a file again: it keeps the daemon's order of keys.
  if (raw_json || parsed.is_discarded() || command.front() == "config") {
    std::printf("%s\n", answer->c_str());
  } else {
    std::fputs(render(command.front(), parsed).c_str(), stdout);
  }
  return 0;
}

}  // namespace
}  // namespace hicache::ctl

int main(int argc, char** argv) {
  // With a further word it is a daemon of that name that is asked.
  if (argc >= 2 && std::string_view(argv[1]) == "doctor" && (argc == 2 || argv[2][0] == '-')) {
    return hicache::ctl::run_doctor(argc - 1, argv + 1);
  }
  if (argc >= 2 && std::string_view(argv[1]) == "hash" && (argc == 2 || argv[2][0] == '-')) {
    return hicache::ctl::run_hash(argc - 1, argv + 1);
  }
  return hicache::ctl::start(argc, argv);
}
