#include "tools/bench/storage_bench.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <system_error>
#include <utility>

#include "shm/clock.hpp"
#include "tools/bench/bare_disk.hpp"
#include "tools/bench/machine.hpp"
#include "tools/bench/progress.hpp"
#include "tools/bench/storage_load.hpp"

namespace hicache::bench {
namespace {

using Json = nlohmann::json;
using Settings = nlohmann::ordered_json;
using daemon::StorageOperation;

// One kind of storage of one page size, with its figures of all repeats.
struct Measured {
  std::string label;
  std::vector<double> write_gbps, read_gbps, write_ratio,
      read_ratio;                           // ratios to the bare disk of the repeat
  std::vector<double> write_cpu, read_cpu;  // seconds a GB
};

constexpr std::uint64_t kWarmUpRound = 1u << 31;  // a page of its own before each measurement

struct Kind {
  std::string label;
  std::string backend;
  Settings settings;
};

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// GB/s and processor seconds a GB of what `body` moves.
struct Rate {
  double gbps = 0;
  double cpu = 0;
};
template <class Body>
Rate rate_of(std::uint64_t bytes, Body&& body) {
  const double cpu = cpu_seconds();
  const std::uint64_t start = monotonic_ns();
  body();
  const double gb = static_cast<double>(bytes) / 1e9;
  const double seconds = static_cast<double>(monotonic_ns() - start) / 1e9;
  return {gb / seconds, (cpu_seconds() - cpu) / gb};
}

void note(std::vector<double>& rates, std::vector<double>& cpu, const Rate& rate) {
  rates.push_back(rate.gbps);
  cpu.push_back(rate.cpu);
}

class StorageBench {
 public:
  StorageBench(const StorageBenchOptions& options, std::unique_ptr<StorageLoad> load)
      : options_(options), load_(std::move(load)) {}

  Result<Json> run() {
    Json sizes = Json::array();
    for (const std::uint64_t page_bytes : options_.page_bytes) {
      auto measured = run_size(page_bytes);
      if (!measured) return measured.error();
      sizes.push_back({{"page_bytes", page_bytes}, {"storage", std::move(*measured)}});
    }
    return Json{{"benchmark", "storage"},
                {"machine", Machine::here().json()},
                {"bytes", options_.bytes},
                {"repeats", options_.repeats},
                {"engine", options_.engine},
                {"sizes", std::move(sizes)},
                {"failed_pages", failed_pages_},
                {"wrong_blocks", wrong_blocks_},
                {"success", failed_pages_ == 0 && wrong_blocks_ == 0}};
  }

 private:
  [[nodiscard]] std::string directory(const std::string& label) const {
    return options_.directory + "/hicache-bench." + label;
  }

  Result<std::vector<Kind>> kinds(std::uint64_t page_bytes) const {
    std::vector<Kind> kinds;
    const Settings common = {
        {"directories", {directory("segment")}}, {"engine", options_.engine}, {"min_free", 0}};
    kinds.push_back({"segment", "file", common});
    kinds.back().settings["segment_bytes"] = std::max<std::uint64_t>(256 * kMiB, 16 * page_bytes);
    const NamespaceSpec spec = storage_spec(page_bytes);
    kinds.push_back({"sglang",
                     "file",
                     {{"format", "sglang"},
                      {"directories", Settings::array({directory("sglang")})},
                      {"min_free", 0},
                      {"sglang",
                       {{"model", spec.model},
                        {"dtype", spec.dtype},
                        {"page_tokens", spec.page_tokens},
                        {"layout", "page_first_direct"}}}}});
    for (const auto& [name, text] : options_.also) {
      auto settings = Settings::parse(text, nullptr, false);
      if (settings.is_discarded()) {
        return Error{Status::invalid_argument, "the settings of " + name + " are no JSON: " + text, 0};
      }
      kinds.push_back({name, name, std::move(settings)});
    }
    return kinds;
  }

  Result<Json> run_size(std::uint64_t page_bytes) {
    const auto kinds_of = kinds(page_bytes);
    if (!kinds_of) return kinds_of.error();
    const auto pages = static_cast<std::uint32_t>(options_.bytes / page_bytes);
    std::vector<std::uint32_t> in_order(pages);
    std::iota(in_order.begin(), in_order.end(), 0u);
    std::vector<Measured> measured{{"bare", {}, {}, {}, {}, {}, {}}};
    for (const Kind& kind : *kinds_of) measured.push_back({kind.label, {}, {}, {}, {}, {}, {}});
    for (std::uint32_t repeat = 0; repeat < options_.repeats; ++repeat) {
      auto shuffled = in_order;
      std::shuffle(shuffled.begin(), shuffled.end(), random_);
      // Bare first in one repeat and last in the next, so that a slow phase of the machine meets all alike.
      std::vector<std::size_t> turn(measured.size());
      std::iota(turn.begin(), turn.end(), std::size_t{0});
      if (repeat % 2 == 1) std::reverse(turn.begin(), turn.end());
      for (const std::size_t i : turn) {
        const Outcome done = i == 0
                                 ? measure_bare(measured[0], page_bytes, in_order, shuffled)
                                 : measure((*kinds_of)[i - 1], measured[i], page_bytes, in_order, shuffled);
        if (!done) return done.error();
        if (interrupted()) return Error{Status::closed, "interrupted", 0};
      }
      for (Measured& m : measured) {
        m.write_ratio.push_back(m.write_gbps.back() / measured[0].write_gbps.back());
        m.read_ratio.push_back(m.read_gbps.back() / measured[0].read_gbps.back());
      }
    }
    return report(page_bytes, measured);
  }

  Outcome measure_bare(Measured& m, std::uint64_t page_bytes, const std::vector<std::uint32_t>& in_order,
                       const std::vector<std::uint32_t>& shuffled) {
    auto disk = BareDisk::create(options_.directory, load_->memory(), options_.depth);
    if (!disk) return disk.error();
    Outcome done = success();
    note(m.write_gbps, m.write_cpu,
         rate_of(options_.bytes, [&] { done = (*disk)->write(in_order, page_bytes); }));
    if (!done) return done;
    note(m.read_gbps, m.read_cpu,
         rate_of(options_.bytes, [&] { done = (*disk)->read(shuffled, page_bytes); }));
    return done;
  }

  Outcome measure(const Kind& kind, Measured& m, std::uint64_t page_bytes,
                  const std::vector<std::uint32_t>& in_order, const std::vector<std::uint32_t>& shuffled) {
    const std::uint64_t round = ++round_;
    load_->fill(page_bytes, round);
    if (Outcome used = load_->use(kind.backend, kind.settings); !used) return used;
    // The bare copy's file is there before the clock starts: so is the backend's first one.
    failed_pages_ += load_->run(StorageOperation::put, page_bytes, kWarmUpRound + round, {0});
    note(m.write_gbps, m.write_cpu, rate_of(options_.bytes, [&] {
           failed_pages_ += load_->run(StorageOperation::put, page_bytes, round, in_order);
         }));
    load_->wipe();
    note(m.read_gbps, m.read_cpu, rate_of(options_.bytes, [&] {
           failed_pages_ += load_->run(StorageOperation::get, page_bytes, round, shuffled);
         }));
    wrong_blocks_ += load_->wrong(page_bytes, round);
    load_->use_none();
    // The next repeat begins with an empty directory, as the bare copy does with a new file.
    std::error_code ignored;
    std::filesystem::remove_all(directory(kind.label), ignored);
    return success();
  }

  static Json report(std::uint64_t page_bytes, const std::vector<Measured>& measured) {
    Json list = Json::array();
    for (const Measured& m : measured) {
      fmt::print(
          "{:>5} KiB {:<10} write {:5.2f} GB/s ({:4.2f} of bare, {:5.3f} CPU s/GB)   read {:5.2f} GB/s "
          "({:4.2f} of "
          "bare, {:5.3f} CPU s/GB)\n",
          page_bytes / kKiB, m.label, median(m.write_gbps), median(m.write_ratio), median(m.write_cpu),
          median(m.read_gbps), median(m.read_ratio), median(m.read_cpu));
      list.push_back({{"name", m.label},
                      {"write_gbps", median(m.write_gbps)},
                      {"read_gbps", median(m.read_gbps)},
                      {"write_of_bare", median(m.write_ratio)},
                      {"read_of_bare", median(m.read_ratio)},
                      {"write_cpu_seconds_per_gb", median(m.write_cpu)},
                      {"read_cpu_seconds_per_gb", median(m.read_cpu)},
                      {"all_write_gbps", m.write_gbps},
                      {"all_read_gbps", m.read_gbps}});
    }
    return list;
  }

  const StorageBenchOptions& options_;
  std::unique_ptr<StorageLoad> load_;
  std::mt19937_64 random_{1};
  std::uint64_t round_ = 0;
  std::uint64_t failed_pages_ = 0;
  std::uint64_t wrong_blocks_ = 0;
};

}  // namespace

Result<Json> run_storage(const StorageBenchOptions& options) {
  for (const std::uint64_t bytes : options.page_bytes) {
    if (bytes == 0 || bytes % kPoolAlignment != 0 || options.bytes % bytes != 0 ||
        options.bytes / bytes < 4) {
      return Error{
          Status::invalid_argument,
          fmt::format(
              "pages of {} bytes do not divide {} bytes into four or more, or are no multiple of 4 KiB",
              bytes, options.bytes),
          0};
    }
  }
  spdlog::set_level(spdlog::level::warn);  // the backend's own log
  auto load = StorageLoad::create(options.bytes);
  if (!load) return load.error();
  return StorageBench(options, std::move(*load)).run();
}

}  // namespace hicache::bench
