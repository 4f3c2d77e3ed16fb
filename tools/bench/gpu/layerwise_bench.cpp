#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "shm/clock.hpp"
#include "tools/bench/gpu/cuda_daemon.hpp"
#include "tools/bench/gpu/gpu_rank.hpp"
#include "tools/bench/gpu/model_shapes.hpp"
#include "tools/bench/gpu/transfer_bench.hpp"
#include "tools/bench/latency_histogram.hpp"
#include "tools/bench/machine.hpp"
#include "tools/bench/report.hpp"

namespace hicache::bench {
namespace {

using Json = nlohmann::json;

constexpr std::uint32_t kFenceRounds = 500;
constexpr std::uint64_t kGiveUpNs = 30'000'000'000;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

std::vector<DevicePage> first_pages(std::uint32_t count) {
  std::vector<DevicePage> pages;
  for (std::uint32_t i = 0; i < count; ++i) pages.push_back(DevicePage{i});
  return pages;
}

struct Times {
  std::vector<double> first_ms;
  std::vector<double> last_ms;
  std::vector<double> unfenced_ms;
};

// One load of `pages` pages that are ready, with the host watching the layer words.
Outcome timed_load(GpuRank& rank, LeaseId lease, std::span<const DevicePage> pages, std::uint32_t layers,
                   Times& times) {
  Session& session = rank.session();
  const LayerFence fence{0, rank.next_fence()};
  const std::uint64_t start = monotonic_ns();
  const auto ticket = session.load(lease, 0, pages, fence);
  if (!ticket) return ticket.error();
  for (const std::uint32_t layer : {0u, layers - 1}) {
    std::uint64_t now = start;
    while (!session.layer_ready(fence, layer)) {
      now = monotonic_ns();
      if (now - start > kGiveUpNs) return Error{Status::timed_out, "a layer never became ready", 0};
    }
    (layer == 0 ? times.first_ms : times.last_ms)
        .push_back(static_cast<double>(monotonic_ns() - start) / 1e6);
  }
  return rank.wait(ticket, static_cast<std::uint32_t>(pages.size()));
}

Outcome measure_layers(const Gpu& gpu, const LayerwiseOptions& options, const std::string& socket_path,
                       BufferLayout layout, const ResultSink& send) {
  const auto shape = find_shape(options.shape);
  if (!shape) return shape.error();
  const NamespaceSpec spec = make_spec(*shape, options.page_tokens);
  const std::uint32_t most = *std::max_element(options.pages.begin(), options.pages.end());
  auto rank = GpuRank::attach(gpu, socket_path, spec, most, layout);
  if (!rank) return rank.error();
  const auto keys = made_up_keys(monotonic_ns(), most);
  const auto pages = first_pages(most);
  auto lease = (*rank)->reserve(keys, 0);
  if (!lease) return lease.error();
  if (Outcome written = (*rank)->wait((*rank)->session().write(*lease, 0, pages), most); !written)
    return written;
  for (const std::uint32_t count : options.pages) {
    Times times;
    for (std::uint32_t i = 0; i < options.repeats; ++i) {
      const auto some = std::span(pages).first(count);
      if (Outcome done = timed_load(**rank, *lease, some, spec.layers, times); !done) return done;
      const std::uint64_t start = monotonic_ns();
      if (Outcome done = (*rank)->wait((*rank)->session().load(*lease, 0, some), count); !done) return done;
      times.unfenced_ms.push_back(static_cast<double>(monotonic_ns() - start) / 1e6);
    }
    const double last = median(times.last_ms);
    send({{"pages", count},
          {"layout", name_of(layout)},
          {"first_layer_ms", median(times.first_ms)},
          {"last_layer_ms", last},
          {"unfenced_ms", median(times.unfenced_ms)},
          {"first_share", median(times.first_ms) / last},
          {"gbps", static_cast<double>(count * spec.shard_bytes()) / last / 1e6}});
  }
  return (*rank)->release(*lease);
}

// One page of 2 KiB: from posting a load to the rank's stream going on, and from the rank's stream raising a
// write fence to the write's end.
Outcome measure_fences(const Gpu& gpu, const std::string& socket_path, const ResultSink& send) {
  NamespaceSpec spec;
  spec.model = "hicache-bench-fence";
  spec.attention = Attention::mla;
  spec.dtype = "bfloat16";
  spec.element_bytes = 2;
  spec.page_tokens = 16;
  spec.layers = 1;
  spec.heads_per_shard = 1;
  spec.head_dim = 64;
  auto rank = GpuRank::attach(gpu, socket_path, spec, 4, BufferLayout::together);
  if (!rank) return rank.error();
  auto stream = GpuStream::create(gpu);
  if (!stream) return stream.error();
  Session& session = (*rank)->session();
  const auto pages = first_pages(1);
  LatencyHistogram loads;
  LatencyHistogram writes;
  for (std::uint32_t i = 0; i < kFenceRounds; ++i) {
    const auto lease = (*rank)->reserve(made_up_keys(monotonic_ns(), 1), 0);
    if (!lease) return lease.error();
    const WriteFence raised{0, i + 1};
    const auto write = session.write(*lease, 0, pages, raised);
    if (!write) return write.error();
    std::uint64_t start = monotonic_ns();
    if (Outcome put = session.stream_raise_write_fence(stream->get(), raised.index, raised.value); !put)
      return put;
    if (Outcome ended = (*rank)->wait(write, 1); !ended) return ended;
    writes.record(monotonic_ns() - start);

    const LayerFence fence{0, (*rank)->next_fence()};
    start = monotonic_ns();
    const auto load = session.load(*lease, 0, pages, fence);
    if (!load) return load.error();
    if (Outcome put = session.stream_wait_layer(stream->get(), fence, 0); !put) return put;
    if (Outcome idle = stream->synchronize(); !idle) return idle;
    loads.record(monotonic_ns() - start);
    if (Outcome ended = (*rank)->wait(load, 1); !ended) return ended;
    if (Outcome released = (*rank)->release(*lease); !released) return released;
  }
  send({{"fences",
         {{"page_bytes", spec.shard_bytes()},
          {"rounds", kFenceRounds},
          {"load_to_stream_us", latency_json(loads)},
          {"stream_to_write_end_us", latency_json(writes)}}}});
  return success();
}

}  // namespace

Result<Json> run_layerwise(const LayerwiseOptions& options) {
  if (options.gpus > 1) return run_group_layerwise(options);
  const auto shape = find_shape(options.shape);
  if (!shape) return shape.error();
  if (options.pages.empty()) return Error{Status::invalid_argument, "no page counts", 0};
  const std::uint32_t most = *std::max_element(options.pages.begin(), options.pages.end());
  auto daemon = start_cuda_daemon(2 * most * make_spec(*shape, options.page_tokens).slot_bytes(),
                                  options.method, options.daemon);
  if (!daemon) return daemon.error();
  Json json{{"machine", Machine::here().json()},
            {"shape", options.shape},
            {"page_tokens", options.page_tokens},
            {"method", options.method},
            {"rows", Json::array()}};
  const std::string socket_path = (*daemon)->socket_path();
  fmt::print("{} pages of {} tokens\n{:<8} {:>5} {:>12} {:>12} {:>12} {:>6} {:>6}\n", options.shape,
             options.page_tokens, "layout", "pages", "first ms", "last ms", "unfenced ms", "first", "GB/s");
  const Outcome done = run_in_rank_process(
      [&](const Gpu& gpu, const ResultSink& send) -> Outcome {
        for (const BufferLayout layout : options.layouts) {
          if (Outcome measured = measure_layers(gpu, options, socket_path, layout, send); !measured)
            return measured;
        }
        return measure_fences(gpu, socket_path, send);
      },
      [&](const Json& row) {
        if (row.contains("fences")) {
          json["fences"] = row["fences"];
          fmt::print("one page of 2 KiB: load to stream p50 {:.1f} us, stream to write end p50 {:.1f} us\n",
                     row["fences"]["load_to_stream_us"]["p50"].get<double>(),
                     row["fences"]["stream_to_write_end_us"]["p50"].get<double>());
          return;
        }
        json["rows"].push_back(row);
        fmt::print("{:<8} {:>5} {:>12.3f} {:>12.3f} {:>12.3f} {:>6.3f} {:>6.1f}\n",
                   row["layout"].get<std::string>(), row["pages"].get<std::uint32_t>(),
                   row["first_layer_ms"].get<double>(), row["last_layer_ms"].get<double>(),
                   row["unfenced_ms"].get<double>(), row["first_share"].get<double>(),
                   row["gbps"].get<double>());
        std::fflush(stdout);
      });
  if (!done) return done.error();
  if (const Outcome stopped = (*daemon)->stop(); !stopped) return stopped.error();
  return json;
}

}  // namespace hicache::bench
