// hicache-top: what a daemon does right now, read from its control region. Never writes, never asks the
// daemon.
#include <sys/ioctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <exception>
#include <thread>

#include "shm/version.hpp"
#include "tools/dump/output.hpp"
#include "tools/dump/region_source.hpp"
#include "tools/top/screen.hpp"

namespace hicache::top {
namespace {

enum ExitCode { kOk = 0, kUsage = 2, kNotFound = 4, kFailed = 5 };

struct Arguments {
  std::string name;
  double interval_s = 1.0;
  std::uint64_t count = 0;  // 0 = until interrupted
};

std::size_t terminal_rows() {
  winsize size{};
  const bool known = ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_row > 0;
  return known ? size.ws_row : 50;
}

int watch(const Arguments& arguments) {
  constexpr const char* kClear = "\033[H\033[2J";
  const bool terminal = ::isatty(STDOUT_FILENO) == 1;
  inspect::Output out(STDOUT_FILENO);
  Reading before;
  for (std::uint64_t turn = 0;; ++turn) {
    // By name each time: a daemon that starts afresh makes a new object.
    auto source = inspect::FileSource::open_region(arguments.name);
    if (!source && turn == 0) {
      std::fprintf(stderr, "hicache-top: %s\n", source.error().message.c_str());
      return source.status() == Status::not_found ? kNotFound : kFailed;
    }
    const Reading now = source ? read(*source) : Reading{};
    // The first reading only starts the clock: rates need two.
    if (turn > 0) {
      if (terminal) out.text(kClear);
      out.text(source ? screen(now, rates_between(before, now), terminal_rows() - 1)
                      : "hicache: " + source.error().message + "\n");
      out.flush();
      if (out.closed() || out.error() != 0) return kOk;
      if (turn == arguments.count) return kOk;
    }
    before = now;
    std::this_thread::sleep_for(std::chrono::duration<double>(arguments.interval_s));
  }
}

int start(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);
  Arguments arguments;
  CLI::App app{"hicache-top: what a hicached does right now"};
  app.set_version_flag("--version", version_text("hicache-top"));
  app.add_option("NAME", arguments.name, "name of the daemon")->required();
  app.add_option("--interval", arguments.interval_s, "seconds between two screens (1)")
      ->check(CLI::Range(0.05, 3600.0));
  app.add_option("--count", arguments.count, "end after this many screens; 0: go on until interrupted");
  app.footer("Exit: 0 ok, 2 wrong command line, 4 no such daemon, 5 its region can't be read.");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? kOk : kUsage;
  }
  try {
    return watch(arguments);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "hicache-top: %s\n", e.what());
    return kFailed;
  }
}

}  // namespace
}  // namespace hicache::top

int main(int argc, char** argv) {
  return hicache::top::start(argc, argv);
}
