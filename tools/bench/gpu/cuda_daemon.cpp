#include "tools/bench/gpu/cuda_daemon.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <nlohmann/json.hpp>

#include "libhicache/include/hicache/client.hpp"
#include "shm/clock.hpp"
#include "shm/types.hpp"
#include "tools/bench/progress.hpp"
#include "tools/bench/visible_gpu.hpp"

namespace hicache::bench {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kPinTimeoutNs = 120'000'000'000;
constexpr std::uint64_t kSegmentBytes = 256 * kMiB;

// Waits until the pool is pinned.
Outcome await_pinned(const DaemonProcess& daemon) {
  const std::uint64_t end = monotonic_ns() + kPinTimeoutNs;
  for (;;) {
    const auto text = control(daemon.socket_path(), {"status"});
    if (!text) return text.error();
    const Json status = Json::parse(*text, nullptr, false);
    const Json cuda = status.is_object() ? status.value("cuda", Json::object()) : Json::object();
    if (cuda.value("state", "off") != "on") {
      return Error{Status::not_permitted, fmt::format("the daemon has no CUDA: {}", cuda.value("reason", "")),
                   0};
    }
    const auto pinned = cuda.value("pinned_bytes", std::uint64_t{0});
    const auto pool = cuda.value("pool_bytes", std::uint64_t{1});
    if (pinned >= pool) return success();
    if (cuda.value("pinning", "") == "failed" || monotonic_ns() > end) {
      return Error{Status::no_space, fmt::format("{} of {} bytes of the pool were pinned", pinned, pool), 0};
    }
    ::usleep(10'000);
  }
}

bool write_line(int fd, const std::string& line) {
  std::size_t at = 0;
  while (at < line.size()) {
    const ssize_t n = ::write(fd, line.data() + at, line.size() - at);
    if (n < 0 && errno != EINTR) return false;
    if (n > 0) at += static_cast<std::size_t>(n);
  }
  return true;
}

}  // namespace

Result<std::unique_ptr<DaemonProcess>> start_cuda_daemon(std::uint64_t pool_bytes, const std::string& method,
                                                         const std::string& patch) {
  const Json changes = Json::parse(patch, nullptr, false);
  if (!changes.is_object())
    return Error{Status::invalid_argument, fmt::format("{}: expected a JSON object", patch), 0};
  Json config{{"name", fmt::format("bench-gpu-{}", ::getpid())},
              {"pool", {{"bytes", align_up(pool_bytes, kSegmentBytes)}, {"segment_bytes", kSegmentBytes}}},
              {"eviction", {{"high_watermark", 0}, {"low_watermark", 0}}},
              {"cuda", {{"mode", "at_start"}}},
              {"transfer", {{"method", method}}},
              {"log", {{"level", "warn"}}}};
  config.merge_patch(changes);
  auto daemon = DaemonProcess::start(config);
  if (!daemon) {
    if (daemon.status() != Status::daemon_absent) return daemon;
    return Error{Status::not_permitted, daemon.error().message, 0};
  }
  if (const Outcome pinned = await_pinned(**daemon); !pinned) return pinned.error();
  return daemon;
}

Outcome run_in_rank_process(const std::function<Outcome(const Gpu&, const ResultSink&)>& body,
                            const ResultSink& sink, std::optional<std::uint32_t> only_gpu) {
  int pipe_fds[2] = {-1, -1};
  if (::pipe(pipe_fds) != 0) return Error{Status::system_error, "pipe failed", errno};
  UniqueFd reader(pipe_fds[0]);
  UniqueFd writer(pipe_fds[1]);
  auto process = ChildProcess::fork_worker("bench-gpu-rank", [&] {
    const ResultSink send = [&](const Json& json) { write_line(writer.get(), json.dump() + '\n'); };
    if (only_gpu) see_only_gpu(*only_gpu);
    const auto gpu = Gpu::open();
    const Outcome outcome = gpu ? body(**gpu, send) : Outcome(gpu.error());
    if (outcome) return 0;
    send({{"error", outcome.error().message}, {"status", to_string(outcome.status())}});
    return 1;
  });
  if (!process) return process.error();
  writer.reset();
  std::string buffer;
  std::string failure;
  char block[65536];
  for (;;) {
    const ssize_t n = ::read(reader.get(), block, sizeof block);
    if (n < 0 && errno == EINTR) {
      if (interrupted()) return Error{Status::closed, "interrupted", 0};
      continue;
    }
    if (n <= 0) break;
    buffer.append(block, static_cast<std::size_t>(n));
    for (std::size_t end = buffer.find('\n'); end != std::string::npos; end = buffer.find('\n')) {
      const Json json = Json::parse(buffer.substr(0, end), nullptr, false);
      buffer.erase(0, end + 1);
      if (json.is_object() && json.contains("error")) {
        failure = fmt::format("{}: {}", json.value("status", ""), json.value("error", ""));
      } else if (json.is_object()) {
        sink(json);
      }
    }
  }
  const auto status = process->wait(60'000);
  if (!status) return status.error();
  if (!failure.empty()) return Error{Status::internal, failure, 0};
  if (*status != 0)
    return Error{Status::peer_lost, fmt::format("the rank exited with status {}", *status), 0};
  return success();
}

}  // namespace hicache::bench
