#include "tools/bench/gpu/transfer_bench.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "shm/clock.hpp"
#include "tools/bench/gpu/cuda_daemon.hpp"
#include "tools/bench/gpu/gpu_rank.hpp"
#include "tools/bench/gpu/model_shapes.hpp"
#include "tools/bench/machine.hpp"
#include "tools/bench/pattern_math.hpp"

namespace hicache::bench {
namespace {

using Json = nlohmann::json;

// Not a value of transfer.method: the rank moves its pages itself, which this engine may.
constexpr const char* kKernelMethod = "kernel";
constexpr const char* kKernelEngine = "bench-kernel";
constexpr useconds_t kLoadWindowUs = 100'000;  // over which the rate of an undisturbed load is taken

enum class Direction : std::size_t { write, load, load_fenced, both, count_ };
constexpr std::array<const char*, static_cast<std::size_t>(Direction::count_)> kDirectionNames{
    "write", "load", "load+fences", "both"};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

// What the daemon's thread has spent on handing copies to the driver, since its start.
struct EnqueueCost {
  std::uint64_t ns = 0;
  std::uint64_t copies = 0;
  std::uint64_t staged_chunks = 0;
  std::uint64_t cpu_ns = 0;  // of all its threads
};

// CPU time that the threads of a process have used; of those that still run.
std::uint64_t cpu_ns_of(const std::string& pid) {
  std::uint64_t sum = 0;
  std::error_code none;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/" + pid + "/task", none)) {
    std::uint64_t ns = 0;
    if (std::ifstream(thread.path() / "schedstat") >> ns) sum += ns;
  }
  return sum;
}

Result<EnqueueCost> enqueue_cost(const std::string& socket_path) {
  const auto text = control(socket_path, {"status"});
  if (!text) return text.error();
  const Json status = Json::parse(*text, nullptr, false);
  EnqueueCost cost;
  cost.cpu_ns = cpu_ns_of(std::to_string(status.value("pid", 0u)));
  for (const Json& gpu : status.value("cuda", Json::object()).value("gpus", Json::array())) {
    cost.ns += gpu.value("enqueue_ns", std::uint64_t{0});
    cost.copies += gpu.value("copies", std::uint64_t{0});
    cost.staged_chunks += gpu.value("staged_chunks", std::uint64_t{0});
  }
  return cost;
}

// What is measured of one direction.
struct Samples {
  std::vector<double> gbps;
  EnqueueCost cost;  // of all repetitions
  std::uint64_t moved = 0;
  std::uint64_t load_steps = 0;
  std::uint64_t ns = 0;
};

// One shape, page size, allocation layout and run length: all directions, alone and beside each load.
class TransferCase {
 public:
  TransferCase(const Gpu& gpu, GpuRank& rank, const TransferOptions& options, std::uint32_t pages,
               std::uint32_t run, std::uint64_t shard_bytes)
      : gpu_(gpu),
        rank_(rank),
        options_(options),
        device_(shuffled_pages(pages, run)),
        keys_(made_up_keys(monotonic_ns(), pages)),
        shard_bytes_(shard_bytes) {
    for (std::uint32_t i = 0; i < pages; ++i) keyed_.push_back({keys_[i], device_[i]});
  }

  // Calls `take` with every result.
  Outcome run(const CopyRates& single, const ResultSink& take, const Json& labels) {
    if (Outcome filled = rank_.memory().fill(keyed_, 0); !filled) return filled;
    if (Outcome idle = rank_.memory().synchronize(); !idle) return idle;
    for (const LoadKind kind : options_.loads) {
      if (Outcome done = beside(kind, single, take, labels); !done) return done;
    }
    return success();
  }

 private:
  Outcome beside(LoadKind kind, const CopyRates& single, const ResultSink& take, const Json& labels) {
    std::unique_ptr<GpuLoad> load;
    double undisturbed = 0;
    std::unique_ptr<GpuRank> silent;
    if (kind == LoadKind::silent_rank) {
      auto attached = attach_silent_rank();
      if (!attached) return attached.error();
      silent = std::move(*attached);
    } else if (kind != LoadKind::none) {
      auto started = GpuLoad::start(gpu_, kind);
      if (!started) return started.error();
      load = std::move(*started);
    }
    std::array<Samples, kDirectionNames.size()> samples;
    for (std::uint32_t i = 0; i <= options_.repeats; ++i) {
      // Clocks move with power and heat, so the load's own rate is taken again before every repetition.
      if (load != nullptr && i > 0) undisturbed += load_rate(*load) / options_.repeats;
      if (Outcome done = iterate(load.get(), i > 0, samples); !done) return done;  // the first warms up
    }
    std::uint64_t wrong = 0;
    std::uint64_t words = 0;
    std::string first;
    if (kind == LoadKind::none) {
      if (Outcome checked = check_bytes(words, wrong, first); !checked) return checked;
    }
    if (load != nullptr && load->failed())
      return Error{Status::system_error, "the load on the GPU failed", 0};
    for (std::size_t i = 0; i < samples.size(); ++i) {
      const auto direction = static_cast<Direction>(i);
      const double limit = direction == Direction::write  ? single.to_host
                           : direction == Direction::both ? single.both
                                                          : single.to_device;
      Json json = labels;
      json["load"] = name_of(kind);
      json["direction"] = kDirectionNames[i];
      json["gbps"] = median(samples[i].gbps);
      json["gbps_low"] = *std::min_element(samples[i].gbps.begin(), samples[i].gbps.end());
      json["gbps_high"] = *std::max_element(samples[i].gbps.begin(), samples[i].gbps.end());
      json["share"] = median(samples[i].gbps) / limit;
      const EnqueueCost& cost = samples[i].cost;
      json["daemon_cores"] = static_cast<double>(cost.cpu_ns) / static_cast<double>(samples[i].ns);
      json["copies"] = cost.copies / options_.repeats;
      json["staged"] = cost.staged_chunks > 0;
      json["enqueue_us_per_copy"] =
          static_cast<double>(cost.ns) / 1e3 / static_cast<double>(std::max<std::uint64_t>(cost.copies, 1));
      json["enqueue_ms_per_gib"] = static_cast<double>(cost.ns) / 1e6 * static_cast<double>(kGiB) /
                                   static_cast<double>(samples[i].moved);
      if (load != nullptr) {
        const double rate =
            static_cast<double>(samples[i].load_steps) * 1e9 / static_cast<double>(samples[i].ns);
        json["compute_kept"] = rate / undisturbed;
        json["compute_alone_tera"] = undisturbed * load->work_per_step() / 1e12;
      }
      if (kind == LoadKind::none) {
        json["verified_words"] = words;
        json["wrong_words"] = wrong;
        if (wrong > 0) json["first_wrong"] = first;
      }
      take(json);
    }
    return success();
  }

  // A rank with a write whose fence it never raises.
  Result<std::unique_ptr<GpuRank>> attach_silent_rank() const {
    constexpr std::uint32_t kSilentPages = 16;
    constexpr std::uint32_t kLongMs = 600'000;
    const auto shape = find_shape("MLA");
    if (!shape) return shape.error();
    auto rank = GpuRank::attach(gpu_, rank_.socket_path(), make_spec(*shape, 1), kSilentPages,
                                BufferLayout::together);
    if (!rank) return rank.error();
    const auto lease = (*rank)->reserve(made_up_keys(monotonic_ns(), kSilentPages), 0);
    if (!lease) return lease.error();
    const auto write =
        (*rank)->session().write(*lease, 0, shuffled_pages(kSilentPages, 1), WriteFence{0, 1}, kLongMs);
    if (!write) return write.error();
    return rank;
  }

  [[nodiscard]] static double load_rate(const GpuLoad& load) {
    const std::uint64_t steps = load.steps();
    const std::uint64_t start = monotonic_ns();
    ::usleep(kLoadWindowUs);
    return static_cast<double>(load.steps() - steps) * 1e9 / static_cast<double>(monotonic_ns() - start);
  }

  // A span of the request as an operation.
  struct Part {
    std::uint32_t first = 0;
    std::uint32_t count = 0;
  };
  [[nodiscard]] std::vector<Part> parts(std::uint32_t first, std::uint32_t count,
                                        std::uint32_t wanted) const {
    std::vector<Part> out;
    const std::uint32_t size = std::max(1u, (count + wanted - 1) / wanted);
    for (std::uint32_t at = 0; at < count; at += size)
      out.push_back({first + at, std::min(size, count - at)});
    return out;
  }
  [[nodiscard]] std::span<const DevicePage> pages(const Part& part) const {
    return std::span(device_).subspan(part.first, part.count);
  }

  // Posts all operations, waits for all, and takes the time.
  Outcome timed(LeaseId lease, const std::vector<Part>& writes, const std::vector<Part>& loads, bool fenced,
                GpuLoad* load, Samples* samples) {
    Session& session = rank_.session();
    std::vector<std::pair<Result<Ticket>, std::uint32_t>> posted;
    posted.reserve(writes.size() + loads.size());
    const auto cost = enqueue_cost(rank_.socket_path());
    if (!cost) return cost.error();
    const std::uint64_t steps = load == nullptr ? 0 : load->steps();
    const std::uint64_t start = monotonic_ns();
    std::uint64_t moved = 0;
    for (std::size_t i = 0; i < std::max(writes.size(), loads.size()); ++i) {
      if (i < writes.size()) {
        posted.emplace_back(session.write(lease, writes[i].first, pages(writes[i])), writes[i].count);
        moved += writes[i].count;
      }
      if (i < loads.size()) {
        std::optional<LayerFence> fence;
        if (fenced) fence = LayerFence{static_cast<std::uint32_t>(i) % kProducerSlots, rank_.next_fence()};
        posted.emplace_back(session.load(lease, loads[i].first, pages(loads[i]), fence), loads[i].count);
        moved += loads[i].count;
      }
    }
    Outcome outcome = success();
    for (const auto& [ticket, count] : posted) {
      if (Outcome ended = rank_.wait(ticket, count); !ended) outcome = ended;
    }
    const std::uint64_t ns = monotonic_ns() - start;
    if (!outcome || samples == nullptr) return outcome;
    samples->gbps.push_back(static_cast<double>(moved * shard_bytes_) / static_cast<double>(ns));
    samples->ns += ns;
    if (load != nullptr) samples->load_steps += load->steps() - steps;
    const auto after = enqueue_cost(rank_.socket_path());
    if (!after) return after.error();
    samples->cost.ns += after->ns - cost->ns;
    samples->cost.cpu_ns += after->cpu_ns - cost->cpu_ns;
    samples->cost.copies += after->copies - cost->copies;
    samples->cost.staged_chunks += after->staged_chunks - cost->staged_chunks;
    samples->moved += moved * shard_bytes_;
    return success();
  }

  Outcome iterate(GpuLoad* load, bool counts, std::array<Samples, kDirectionNames.size()>& samples) {
    const auto of = [&](Direction d) { return counts ? &samples[static_cast<std::size_t>(d)] : nullptr; };
    const auto all = static_cast<std::uint32_t>(keys_.size());
    const std::uint32_t half = all / 2;
    const std::vector<Part> whole = parts(0, all, options_.operations);
    if (Outcome done = with_lease(
            keys_, 0,
            [&](LeaseId lease) { return timed(lease, whole, {}, false, load, of(Direction::write)); });
        !done) {
      return done;
    }
    if (Outcome done = with_lease(keys_, all,
                                  [&](LeaseId lease) {
                                    Outcome o = timed(lease, {}, whole, false, load, of(Direction::load));
                                    return o ? timed(lease, {}, whole, true, load, of(Direction::load_fenced))
                                             : o;
                                  });
        !done) {
      return done;
    }
    if (Outcome cleared = rank_.clear(); !cleared) return cleared;
    const std::vector<Part> old = parts(0, half, std::max(1u, options_.operations / 2));
    const std::vector<Part> fresh = parts(half, all - half, std::max(1u, options_.operations / 2));
    if (Outcome done = with_lease(std::span(keys_).first(half), 0,
                                  [&](LeaseId lease) { return timed(lease, old, {}, false, load, nullptr); });
        !done) {
      return done;
    }
    if (Outcome done = with_lease(
            keys_, half,
            [&](LeaseId lease) { return timed(lease, fresh, old, false, load, of(Direction::both)); });
        !done) {
      return done;
    }
    return rank_.clear();
  }

  template <class Body>
  Outcome with_lease(std::span<const PrefixHash> keys, std::uint32_t hits, Body&& body) {
    const auto lease = rank_.reserve(keys, hits);
    if (!lease) return lease.error();
    if (Outcome done = body(*lease); !done) return done;
    return rank_.release(*lease);
  }

  // Writes all pages, spoils the device's, loads them, and looks at every byte; then the same with fences.
  Outcome check_bytes(std::uint64_t& words, std::uint64_t& wrong, std::string& first) {
    const auto all = static_cast<std::uint32_t>(keys_.size());
    const std::vector<Part> whole = parts(0, all, options_.operations);
    const auto before = rank_.memory().verify(keyed_, 0);
    if (!before) return before.error();
    wrong += before->wrong;
    if (before->wrong > 0)
      first += fmt::format("before: {} words wrong, {} poison; ", before->wrong, before->poison);
    if (Outcome done = with_lease(
            keys_, 0, [&](LeaseId lease) { return timed(lease, whole, {}, false, nullptr, nullptr); });
        !done) {
      return done;
    }
    for (const bool fenced : {false, true}) {
      if (Outcome done = rank_.memory().poison(keyed_); !done) return done;
      if (Outcome done = rank_.memory().synchronize(); !done) return done;
      if (Outcome done = with_lease(
              keys_, all, [&](LeaseId lease) { return timed(lease, {}, whole, fenced, nullptr, nullptr); });
          !done) {
        return done;
      }
      const auto found = rank_.memory().verify(keyed_, 0);
      if (!found) return found.error();
      words += found->words;
      wrong += found->wrong;
      if (found->wrong == 0) continue;
      first += fmt::format("{} load: {} words wrong, {} of them never written, one at {}; ",
                           fenced ? "fenced" : "plain", found->wrong, found->poison, found->first);
    }
    return rank_.clear();
  }

  const Gpu& gpu_;
  GpuRank& rank_;
  const TransferOptions& options_;
  std::vector<DevicePage> device_;
  std::vector<PrefixHash> keys_;
  std::vector<KeyedPage> keyed_;
  std::uint64_t shard_bytes_;
};

Outcome run_cases(const TransferOptions& options, const std::string& socket_path, const std::string& method,
                  const Gpu& gpu, const ResultSink& send) {
  const auto single = measure_copies(gpu, options.bytes);
  if (!single) return single.error();
  send({{"single_copy",
         {{"gpu", gpu.name()},
          {"to_device_gbps", single->to_device},
          {"to_host_gbps", single->to_host},
          {"both_gbps", single->both}}}});
  for (const std::string& shape_name : options.shapes) {
    const auto shape = find_shape(shape_name);
    if (!shape) return shape.error();
    for (const std::uint32_t tokens : options.page_tokens) {
      const NamespaceSpec spec = make_spec(*shape, tokens);
      const auto pages = static_cast<std::uint32_t>(options.bytes / spec.shard_bytes());
      for (const BufferLayout layout : options.layouts) {
        const bool kernel = method == kKernelMethod;
        auto rank =
            GpuRank::attach(gpu, socket_path, spec, pages, layout, {kernel ? kKernelEngine : "", 0},
                            AttachOptions().staging_bytes, kernel ? IoBackend::kernel : IoBackend::direct);
        if (!rank) return rank.error();
        for (const std::uint32_t run : options.runs) {
          const Json labels{{"method", method},
                            {"shape", shape_name},
                            {"page_tokens", tokens},
                            {"piece_bytes", spec.piece_bytes()},
                            {"pages", pages},
                            {"layout", name_of(layout)},
                            {"run", run},
                            {"register_ms", (*rank)->register_ms()}};
          TransferCase one(gpu, **rank, options, pages, run, spec.shard_bytes());
          if (const Outcome done = one.run(*single, send, labels); !done) {
            return Error{done.status(),
                         fmt::format("{} page {} {} run {}: {}", shape_name, tokens, name_of(layout), run,
                                     done.error().message),
                         0};
          }
        }
      }
    }
  }
  return success();
}

void print_header() {
  fmt::print(
      "{:<11} {:<8} {:>5} {:>9} {:<8} {:>4} {:<6} {:<11} {:>6} {:>6} {:>7} {:>7} {:>8} {:>5} {:<6} {}\n",
      "method", "shape", "page", "piece", "layout", "run", "load", "direction", "GB/s", "share", "compute",
      "us/copy", "ms/GiB", "cores", "how", "bytes");
}

void print_row(const Json& row) {
  fmt::print(
      "{:<11} {:<8} {:>5} {:>9} {:<8} {:>4} {:<6} {:<11} {:>6.1f} {:>6.3f} {:>7} {:>7.2f} {:>8.2f} {:>5.2f} "
      "{:<6} {}\n",
      row["method"].get<std::string>(), row["shape"].get<std::string>(),
      row["page_tokens"].get<std::uint32_t>(), row["piece_bytes"].get<std::uint64_t>(),
      row["layout"].get<std::string>(), row["run"].get<std::uint32_t>(), row["load"].get<std::string>(),
      row["direction"].get<std::string>(), row["gbps"].get<double>(), row["share"].get<double>(),
      row.contains("compute_kept") ? fmt::format("{:.3f}", row["compute_kept"].get<double>()) : "-",
      row["enqueue_us_per_copy"].get<double>(), row["enqueue_ms_per_gib"].get<double>(),
      row["daemon_cores"].get<double>(),
      row["method"] == kKernelMethod ? kKernelMethod
      : row["staged"].get<bool>()    ? "staged"
                                     : "direct",
      !row.contains("wrong_words")         ? ""
      : row["wrong_words"].get<int>() == 0 ? "right"
                                           : "WRONG");
  std::fflush(stdout);
}

}  // namespace

std::vector<DevicePage> shuffled_pages(std::uint32_t count, std::uint32_t run) {
  std::vector<std::uint32_t> blocks((count + run - 1) / run);
  std::iota(blocks.begin(), blocks.end(), 0u);
  std::uint64_t random = 42;
  for (std::size_t i = blocks.size(); i > 1; --i) {
    random = pattern_mix(random + i);
    std::swap(blocks[i - 1], blocks[random % i]);
  }
  std::vector<DevicePage> pages;
  for (const std::uint32_t block : blocks) {
    for (std::uint32_t i = block * run; i < std::min(count, (block + 1) * run); ++i)
      pages.push_back(DevicePage{i});
  }
  return pages;
}

Result<Json> run_transfer(const TransferOptions& options) {
  if (options.gpus > 1) return run_group_transfer(options);
  Json json{{"machine", Machine::here().json()}, {"bytes", options.bytes},
            {"operations", options.operations},  {"daemon", options.daemon},
            {"repeats", options.repeats},        {"rows", Json::array()},
            {"skipped", Json::object()}};
  std::uint64_t wrong = 0;
  print_header();
  for (const std::string& method : options.methods) {
    Json changes = Json::parse(options.daemon, nullptr, false);
    if (method == kKernelMethod && changes.is_object()) changes["pool"]["map_engines"] = {kKernelEngine};
    auto daemon =
        start_cuda_daemon(options.bytes + options.bytes / 2, method == kKernelMethod ? "auto" : method,
                          changes.is_object() ? changes.dump() : options.daemon);
    if (!daemon && daemon.status() == Status::not_permitted) {
      json["skipped"][method] = daemon.error().message;
      fmt::print("{}: skipped: {}\n", method, daemon.error().message);
      continue;
    }
    if (!daemon) return daemon.error();
    const std::string socket_path = (*daemon)->socket_path();
    const Outcome done = run_in_rank_process(
        [&](const Gpu& gpu, const ResultSink& send) {
          return run_cases(options, socket_path, method, gpu, send);
        },
        [&](const Json& row) {
          if (row.contains("single_copy")) {
            json["single_copy"][method] = row["single_copy"];
            fmt::print("single copy, {}: {}\n", method, row["single_copy"].dump());
            return;
          }
          wrong += row.value("wrong_words", std::uint64_t{0});
          print_row(row);
          json["rows"].push_back(row);
        });
    if (!done) {
      json["failed"][method] = done.error().message;
      fmt::print("{}: FAILED: {}\n", method, done.error().message);
    }
    if (const Outcome stopped = (*daemon)->stop(); !stopped) return stopped.error();
  }
  json["wrong_words"] = wrong;
  for (const Json& row : json["rows"]) {
    if (row.contains("first_wrong")) fmt::print("WRONG: {}\n", row["first_wrong"].get<std::string>());
  }
  return json;
}

}  // namespace hicache::bench
