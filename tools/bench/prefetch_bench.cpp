#include "tools/bench/prefetch_bench.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "libhicache/include/hicache/client.hpp"
#include "shm/clock.hpp"
#include "tools/bench/bench_model.hpp"
#include "tools/bench/daemon_process.hpp"
#include "tools/bench/machine.hpp"
#include "tools/bench/page_pattern.hpp"
#include "tools/bench/progress.hpp"
#include "tools/bench/prompt_rank.hpp"
#include "tools/bench/replay.hpp"

namespace hicache::bench {
namespace {

using Json = nlohmann::json;

constexpr std::uint32_t kWaitMs = 120'000;
constexpr std::uint32_t kDevicePages = 64;

double ms_since(std::uint64_t start_ns, std::uint64_t at_ns) {
  return static_cast<double>(at_ns - start_ns) / 1e6;
}

// One rank whose device pages serve again and again: the prefix is longer than its memory.
class Rank {
 public:
  static Result<std::unique_ptr<Rank>> attach(const std::string& socket_path, const NamespaceSpec& spec) {
    auto memory = DeviceMemory::create(spec, kDevicePages);
    if (!memory) return memory.error();
    AttachOptions options;
    options.socket_path = socket_path;
    options.engine = "prefetch-bench";
    options.spec = spec;
    auto session = Session::attach(options);
    if (!session) return session.error();
    if (Outcome registered = memory->register_with(**session); !registered) return registered.error();
    return std::unique_ptr<Rank>(new Rank(std::move(*memory), std::move(*session), spec));
  }

  Session& session() { return *session_; }
  Result<OperationResult> run(const Result<Ticket>& ticket) {
    if (!ticket) return ticket.error();
    auto result = session_->wait(*ticket, kWaitMs);
    if (result && result->status != Status::ok) {
      return Error{result->status,
                   fmt::format("{} ended with {}", to_string(result->opcode), to_string(result->status)), 0};
    }
    return result;
  }
  // Writes pages [first, first + count) of the prefix.
  Outcome write(LeaseId lease, const std::vector<PrefixHash>& keys, std::uint32_t first,
                std::uint32_t count) {
    std::vector<DevicePage> pages;
    for (std::uint32_t i = 0; i < count; ++i) {
      pages.push_back(DevicePage{i});
      for (const DeviceTensor& tensor : memory_.geometry().tensors) {
        fill_piece(memory_.piece(tensor, pages[i]), base_of(tensor, keys[first + i]));
      }
    }
    const auto written = run(session_->write(lease, first, pages));
    if (!written) return written.error();
    if (written->written == count) return success();
    return Error{Status::no_space, fmt::format("{} of {} pages were kept", written->written, count), 0};
  }
  // Loads one page and counts the words that are not what was written.
  Result<std::uint64_t> wrong_words(LeaseId lease, const std::vector<PrefixHash>& keys, std::uint32_t page) {
    const DevicePage to{page % kDevicePages};
    for (const DeviceTensor& tensor : memory_.geometry().tensors) poison(memory_.piece(tensor, to));
    const auto loaded = run(session_->load(lease, page, std::vector<DevicePage>{to}));
    if (!loaded) return loaded.error();
    std::uint64_t wrong = 0;
    for (const DeviceTensor& tensor : memory_.geometry().tensors) {
      wrong += count_wrong_words(memory_.piece(tensor, to), base_of(tensor, keys[page]));
    }
    return wrong;
  }

 private:
  Rank(DeviceMemory memory, std::unique_ptr<Session> session, const NamespaceSpec& spec)
      : memory_(std::move(memory)), session_(std::move(session)), digest_(spec.digest()) {}
  [[nodiscard]] std::uint64_t base_of(const DeviceTensor& tensor, const PrefixHash& key) const {
    return piece_base({digest_, key, 0, tensor.layer, tensor.kind});
  }

  DeviceMemory memory_;
  std::unique_ptr<Session> session_;
  PrefixHash digest_;
};

Outcome ask(const DaemonProcess& daemon, const std::vector<std::string>& words) {
  const auto answer = control(daemon.socket_path(), words, kWaitMs);
  return answer ? success() : Outcome(answer.error());
}

Json daemon_config(const PrefetchBenchOptions& options, const NamespaceSpec& spec) {
  ReplayOptions storage;
  storage.storage = options.storage;
  storage.storage_dir = options.storage_dir;
  Json config =
      config_with_storage(config_with_pool(Json{{"name", fmt::format("bench-prefetch-{}", ::getpid())}}, spec,
                                           options.pages + 64),
                          storage);
  if (options.storage == "memory") config["storage"]["memory"]["delay_us"] = options.memory_delay_us;
  return config;
}

}  // namespace

Result<Json> run_prefetch_bench(const PrefetchBenchOptions& options) {
  const auto spec = make_spec(Attention::mha, 1, options.page_bytes);
  if (!spec) return spec.error();
  auto daemon = DaemonProcess::start(daemon_config(options, *spec));
  if (!daemon) return daemon.error();
  auto attached = Rank::attach((*daemon)->socket_path(), *spec);
  if (!attached) return attached.error();
  Rank& rank = **attached;
  const auto keys = prompt_keys(1, options.pages);

  auto lease = rank.run(rank.session().reserve(1, keys));
  if (!lease) return lease.error();
  for (std::uint32_t first = 0; first < options.pages; first += kDevicePages) {
    if (interrupted()) return Error{Status::closed, "interrupted", 0};
    const std::uint32_t count = std::min(kDevicePages, options.pages - first);
    if (Outcome written = rank.write(lease->lease, keys, first, count); !written) return written.error();
  }
  if (auto released = rank.run(rank.session().release(lease->lease)); !released) return released.error();
  if (Outcome synced = ask(**daemon, {"storage", "sync"}); !synced) return synced.error();
  if (Outcome cleared = ask(**daemon, {"clear"}); !cleared) return cleared.error();

  lease = rank.run(rank.session().reserve(2, keys));
  if (!lease) return lease.error();
  const std::uint64_t start = monotonic_ns();
  const auto ticket = rank.session().prefetch(lease->lease, 0, options.pages);
  if (!ticket) return ticket.error();
  const auto wait_for = [&](std::uint32_t leading) {
    while (!interrupted() && rank.session().state() == Status::ok &&
           rank.session().probe({keys.data(), leading}).leading < leading) {
      ::usleep(20);
    }
    return monotonic_ns();
  };
  const std::uint64_t first_ready = wait_for(1);
  auto wrong = rank.wrong_words(lease->lease, keys, 0);
  if (!wrong) return wrong.error();
  const std::uint64_t first_loaded = monotonic_ns();
  const std::uint64_t half_ready = wait_for(options.pages / 2);
  const auto result = rank.run(ticket);
  if (!result) return result.error();
  const std::uint64_t all_ready = monotonic_ns();
  for (std::uint32_t page = 1; page < result->written; ++page) {
    const auto more = rank.wrong_words(lease->lease, keys, page);
    if (!more) return more.error();
    *wrong += *more;
  }
  attached->reset();
  if (Outcome stopped = (*daemon)->stop(); !stopped) return stopped.error();

  const double total_ms = ms_since(start, all_ready);
  const bool success = result->written == options.pages && *wrong == 0 && first_loaded < all_ready;
  fmt::print(
      "prefetch: {} pages of {} KiB from {}\n"
      "  first page ready after {:.2f} ms, loaded and compared after {:.2f} ms ({:.1f} % of the whole)\n"
      "  half of them ready after {:.2f} ms, all after {:.2f} ms ({:.2f} GB/s)\n"
      "  {} pages came, {} wrong words\n",
      options.pages, options.page_bytes / kKiB, options.storage, ms_since(start, first_ready),
      ms_since(start, first_loaded), 100 * ms_since(start, first_loaded) / total_ms,
      ms_since(start, half_ready), total_ms,
      static_cast<double>(options.page_bytes) * result->written / (total_ms * 1e6), result->written, *wrong);
  return Json{{"machine", Machine::here().json()},
              {"storage", options.storage},
              {"pages", options.pages},
              {"page_bytes", options.page_bytes},
              {"pages_fetched", result->written},
              {"verify_errors", *wrong},
              {"first_ready_ms", ms_since(start, first_ready)},
              {"first_loaded_ms", ms_since(start, first_loaded)},
              {"half_ready_ms", ms_since(start, half_ready)},
              {"all_ready_ms", total_ms},
              {"first_loaded_over_all_ready", ms_since(start, first_loaded) / total_ms},
              {"success", success}};
}

}  // namespace hicache::bench
