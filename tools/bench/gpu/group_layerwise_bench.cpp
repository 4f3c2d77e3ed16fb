// `hicache-bench layerwise --gpus N`: when the layers of loads are ready on all ranks of a TP group.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "shm/clock.hpp"
#include "tools/bench/gpu/gpu_group.hpp"
#include "tools/bench/gpu/gpu_rank.hpp"
#include "tools/bench/gpu/model_shapes.hpp"
#include "tools/bench/gpu/transfer_bench.hpp"
#include "tools/bench/machine.hpp"

namespace hicache::bench {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kGiveUpNs = 30'000'000'000;

std::vector<DevicePage> first_pages(std::uint32_t count) {
  std::vector<DevicePage> pages;
  for (std::uint32_t i = 0; i < count; ++i) pages.push_back(DevicePage{i});
  return pages;
}

// Waits until a layer is ready, without giving the core away.
Outcome spin_for_layer(const Session& session, const LayerFence& fence, std::uint32_t layer) {
  const std::uint64_t start = monotonic_ns();
  while (!session.layer_ready(fence, layer)) {
    if (monotonic_ns() - start > kGiveUpNs) return Error{Status::timed_out, "a layer never became ready", 0};
  }
  return success();
}

Outcome measure_layers(GroupMember& member, const Gpu& gpu, const LayerwiseOptions& options,
                       const std::string& socket_path, const std::string& mla, BufferLayout layout,
                       const ResultSink& send) {
  const auto shape = find_shape(options.shape);
  if (!shape) return shape.error();
  NamespaceSpec spec = make_spec(*shape, options.page_tokens);
  spec.tp_size = member.size();
  const std::uint32_t most = *std::max_element(options.pages.begin(), options.pages.end());
  const GroupPlace place{fmt::format("layerwise-{}", name_of(layout)), member.rank()};
  auto rank = GpuRank::attach(gpu, socket_path, spec, most, layout, place);
  if (!rank) return rank.error();
  Session& session = (*rank)->session();
  if (Outcome met = member.meet(); !met) return met;
  const auto pages = first_pages(most);
  const auto lease = (*rank)->reserve(made_up_keys(static_cast<std::uint64_t>(layout) + 1, most), 0);
  if (!lease) return lease.error();
  if (Outcome written = (*rank)->wait(session.write(*lease, 0, pages), most); !written) return written;
  for (const std::uint32_t count : options.pages) {
    std::vector<double> first_ms;
    std::vector<double> last_ms;
    for (std::uint32_t i = 0; i < options.repeats; ++i) {
      const LayerFence fence{0, (*rank)->next_fence()};
      std::uint64_t start = 0;
      std::uint64_t first_ns = 0;
      Result<Ticket> ticket = Error{Status::internal, "not posted", 0};
      const auto times = member.timed([&]() -> Outcome {
        start = monotonic_ns();
        ticket = session.load(*lease, 0, std::span(pages).first(count), fence);
        if (!ticket) return ticket.error();
        if (Outcome ready = spin_for_layer(session, fence, 0); !ready) return ready;
        first_ns = monotonic_ns();
        return spin_for_layer(session, fence, spec.layers - 1);
      });
      if (!times) return times.error();
      // The slowest rank's, each from its own start.
      const auto firsts = member.share(static_cast<double>(first_ns - start));
      if (!firsts) return firsts.error();
      if (Outcome ended = (*rank)->wait(ticket, count); !ended) return ended;
      first_ms.push_back(*std::max_element(firsts->begin(), firsts->end()) / 1e6);
      last_ms.push_back(times->makespan_ns / 1e6);
    }
    const double last = median_of(last_ms);
    const double bytes = static_cast<double>(count) * static_cast<double>(spec.shard_bytes()) *
                         (shape->attention == Attention::mla ? 1 : member.size());
    send({{"pages", count},
          {"layout", name_of(layout)},
          {"mla", shape->attention == Attention::mla ? mla : "-"},
          {"first_layer_ms", median_of(first_ms)},
          {"last_layer_ms", last},
          {"first_share", median_of(first_ms) / last},
          {"total_gbps", bytes / last / 1e6}});
  }
  if (Outcome released = (*rank)->release(*lease); !released) return released;
  return member.meet();
}

}  // namespace

Result<Json> run_group_layerwise(const LayerwiseOptions& options) {
  const auto shape = find_shape(options.shape);
  if (!shape) return shape.error();
  if (options.pages.empty()) return Error{Status::invalid_argument, "no page counts", 0};
  NamespaceSpec spec = make_spec(*shape, options.page_tokens);
  spec.tp_size = options.gpus;
  const std::uint32_t most = *std::max_element(options.pages.begin(), options.pages.end());
  Json json{{"machine", Machine::here().json()},  {"shape", options.shape},
            {"page_tokens", options.page_tokens}, {"gpus", options.gpus},
            {"method", options.method},           {"rows", Json::array()}};
  fmt::print("{} pages of {} tokens, {} GPUs\n{:<8} {:<8} {:>5} {:>12} {:>12} {:>6} {:>7}\n", options.shape,
             options.page_tokens, options.gpus, "layout", "mla", "pages", "first ms", "last ms", "first",
             "GB/s");
  for (const char* mla : {"direct", "exchange"}) {
    if (shape->attention != Attention::mla && std::string_view(mla) != "direct") continue;
    Json patch = Json::parse(options.daemon, nullptr, false);
    if (!patch.is_object())
      return Error{Status::invalid_argument, fmt::format("{}: expected a JSON object", options.daemon), 0};
    patch.merge_patch({{"mla", {{"load", mla}}}});
    auto daemon = start_cuda_daemon(3 * most * spec.slot_bytes(), options.method, patch.dump());
    if (!daemon) return daemon.error();
    const std::string socket_path = (*daemon)->socket_path();
    const Outcome done = run_gpu_group(
        options.gpus, options.gpus,
        [&](GroupMember& member, const Gpu& gpu, const ResultSink& send) -> Outcome {
          for (const BufferLayout layout : options.layouts) {
            if (Outcome measured = measure_layers(member, gpu, options, socket_path, mla, layout, send);
                !measured)
              return measured;
          }
          return success();
        },
        [&](const Json& row) {
          json["rows"].push_back(row);
          fmt::print("{:<8} {:<8} {:>5} {:>12.3f} {:>12.3f} {:>6.3f} {:>7.1f}\n",
                     row["layout"].get<std::string>(), row["mla"].get<std::string>(),
                     row["pages"].get<std::uint32_t>(), row["first_layer_ms"].get<double>(),
                     row["last_layer_ms"].get<double>(), row["first_share"].get<double>(),
                     row["total_gbps"].get<double>());
          std::fflush(stdout);
        });
    if (!done) return done.error();
    if (const Outcome stopped = (*daemon)->stop(); !stopped) return stopped.error();
  }
  return json;
}

}  // namespace hicache::bench
