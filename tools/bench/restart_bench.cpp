#include "tools/bench/restart_bench.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "hicache/client.hpp"
#include "shm/clock.hpp"
#include "tools/bench/bench_model.hpp"
#include "tools/bench/daemon_process.hpp"
#include "tools/bench/machine.hpp"
#include "tools/bench/progress.hpp"
#include "tools/bench/prompt_rank.hpp"

namespace hicache::bench {
namespace {

using Json = nlohmann::json;

constexpr std::uint32_t kPromptPages = 125;
constexpr std::uint64_t kPatienceNs = 60'000'000'000ull;

double ms_between(std::uint64_t from_ns, std::uint64_t to_ns) {
  return static_cast<double>(to_ns - from_ns) / 1e6;
}

Json daemon_config(const RestartOptions& options) {
  return Json{{"name", fmt::format("bench-restart-{}", ::getpid())},
              {"pool", {{"bytes", options.pool_bytes}, {"max_pages", options.pages + 1024}}},
              {"cuda", {{"mode", options.pinned ? "at_start" : "off"}}},
              {"eviction", {{"high_watermark", 0.0}, {"low_watermark", 0.0}}}};
}

// Waits until the daemon has pinned its pool, and says when; an error when it will not.
Result<std::uint64_t> await_pinning(const std::string& socket_path) {
  const std::uint64_t limit_ns = monotonic_ns() + kPatienceNs;
  for (;;) {
    const auto answer = control(socket_path, {"status"});
    if (!answer) return answer.error();
    const Json cuda = Json::parse(*answer).at("cuda");
    if (cuda.at("state") != "on")
      return Error{Status::not_found, "CUDA is off: " + cuda.value("reason", std::string()), 0};
    const std::string pinning = cuda.at("pinning");
    if (pinning == "done") return monotonic_ns();
    if (pinning == "failed" || monotonic_ns() > limit_ns)
      return Error{Status::system_error, "the pool was not pinned: " + pinning, 0};
    ::usleep(5000);
  }
}

}  // namespace

Result<Json> run_restart(const RestartOptions& options) {
  const auto spec = make_spec(Attention::mha, 1, options.page_bytes);
  if (!spec) return spec.error();
  auto memory = DeviceMemory::create(*spec, kPromptPages);
  if (!memory) return memory.error();
  auto daemon = DaemonProcess::start(daemon_config(options));
  if (!daemon) return daemon.error();

  PromptRankOptions rank_options;
  rank_options.socket_path = (*daemon)->socket_path();
  rank_options.engine = "restart-bench";
  const std::uint32_t prompts = (options.pages + kPromptPages - 1) / kPromptPages;
  const auto pages_of = [&](std::uint32_t n) {
    return std::min(kPromptPages, options.pages - n * kPromptPages);
  };
  std::uint32_t written = 0;
  if (options.pinned) {
    if (const auto pinned = await_pinning((*daemon)->socket_path()); !pinned) return pinned.error();
  }
  {
    auto rank = PromptRank::attach(rank_options, *spec, *memory);
    if (!rank) return rank.error();
    for (std::uint32_t n = 0; n < prompts && !interrupted(); ++n) {
      const auto request = (*rank)->request(prompt_keys(n, pages_of(n)), 0, true);
      if (!request) return request.error();
      written += request->written;
    }
    if (interrupted()) return Error{Status::closed, "interrupted", 0};
    if (written != options.pages) {
      return Error{Status::no_space,
                   fmt::format("{} of {} pages fitted the pool: make it larger or the pages smaller", written,
                               options.pages),
                   0};
    }
  }
  const std::uint64_t killed_ns = monotonic_ns();
  if (Outcome killed = (*daemon)->kill(); !killed) return killed.error();
  const std::uint64_t ended_ns = monotonic_ns();
  if (Outcome spawned = (*daemon)->spawn(); !spawned) return spawned.error();
  Result<std::unique_ptr<PromptRank>> rank = Error{Status::daemon_absent, "", 0};
  while (!(rank = PromptRank::attach(rank_options, *spec, *memory))) {
    if (monotonic_ns() - ended_ns > kPatienceNs) return rank.error();
    ::usleep(1000);
  }
  const std::uint64_t attached_ns = monotonic_ns();
  const auto first = (*rank)->request(prompt_keys(prompts / 2, pages_of(prompts / 2)), 1, false);
  if (!first) return first.error();
  const std::uint64_t hit_ns = monotonic_ns();

  std::uint32_t found = 0;
  std::uint64_t wrong = first->wrong_words;
  for (std::uint32_t n = 0; n < prompts && !interrupted(); ++n) {
    const auto reading = (*rank)->request(prompt_keys(n, pages_of(n)), kPromptPages, false);
    if (!reading) return reading.error();
    found += reading->hits;
    wrong += reading->wrong_words;
  }
  if (interrupted()) return Error{Status::closed, "interrupted", 0};
  Json to_pinned_ms;
  if (options.pinned) {
    const auto pinned = await_pinning((*daemon)->socket_path());
    if (!pinned) return pinned.error();
    to_pinned_ms = ms_between(ended_ns, *pinned);
  }
  rank->reset();
  if (Outcome stopped = (*daemon)->stop(); !stopped) return stopped.error();
  const bool success = found == options.pages && wrong == 0 && first->hits == 1;
  fmt::print(
      "restart: pool of {:.1f} GiB with {} ready pages of {} KiB\n"
      "  the killed process ended after {:.0f} ms\n"
      "  attached {:.0f} ms, first page loaded and compared {:.0f} ms after its end\n"
      "  {} pages found again, {} wrong words\n",
      static_cast<double>(options.pool_bytes) / kGiB, options.pages, options.page_bytes / kKiB,
      ms_between(killed_ns, ended_ns), ms_between(ended_ns, attached_ns), ms_between(ended_ns, hit_ns), found,
      wrong);
  return Json{{"machine", Machine::here().json()},
              {"pool_bytes", options.pool_bytes},
              {"page_bytes", options.page_bytes},
              {"pinned", options.pinned},
              {"end_to_pinned_ms", to_pinned_ms},  // at most: looked at once all pages had been read
              {"pages_written", written},
              {"pages_found", found},
              {"verify_errors", wrong},
              {"kill_to_end_ms", ms_between(killed_ns, ended_ns)},
              {"end_to_attached_ms", ms_between(ended_ns, attached_ns)},
              {"end_to_first_hit_ms", ms_between(ended_ns, hit_ns)},
              {"success", success}};
}

}  // namespace hicache::bench
