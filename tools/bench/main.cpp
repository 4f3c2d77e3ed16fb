// hicache-bench: replays of requests with every byte checked, and benchmarks of the control path.
#include <CLI/CLI.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "shm/version.hpp"
#include "tools/bench/bench_model.hpp"
#include "tools/bench/chaos_bench.hpp"
#include "tools/bench/micro_bench.hpp"
#include "tools/bench/prefetch_bench.hpp"
#include "tools/bench/progress.hpp"
#include "tools/bench/replay.hpp"
#include "tools/bench/report.hpp"
#include "tools/bench/restart_bench.hpp"
#include "tools/bench/storage_bench.hpp"
#include "tools/bench/tree_bench.hpp"
#ifdef HICACHE_CUDA
#include "tools/bench/gpu/commands.hpp"
#endif

namespace {

using namespace hicache;         // NOLINT(google-build-using-namespace): the program's own file
using namespace hicache::bench;  // NOLINT(google-build-using-namespace)

constexpr int kUsage = 2;
constexpr int kInterrupted = 130;

int fail(const Error& error) {
  fmt::print(stderr, "hicache-bench: {}: {}\n", to_string(error.status), error.message);
  return 1;
}

int replay(const ReplayOptions& options, const std::string& json_path) {
  const auto result = run_replay(options);
  if (!result) return interrupted() ? kInterrupted : fail(result.error());
  fmt::print(json_path == "-" ? stderr : stdout, "{}", replay_summary(options, **result));
  if (const Outcome written = write_json(json_path, replay_json(options, **result)); !written) {
    return fail(written.error());
  }
  if ((*result)->interrupted) return kInterrupted;
  return (*result)->success() ? 0 : 1;
}

int micro(const std::function<Result<nlohmann::json>(const MicroOptions&)>& run, const MicroOptions& options,
          const std::string& json_path) {
  const auto json = run(options);
  if (!json) return interrupted() ? kInterrupted : fail(json.error());
  const Outcome written = write_json(json_path, *json);
  return written ? 0 : fail(written.error());
}

// Exit status of a run that says itself whether it succeeded.
int judged(const Result<nlohmann::json>& result, const std::string& json_path) {
  if (!result) return interrupted() ? kInterrupted : fail(result.error());
  if (const Outcome written = write_json(json_path, *result); !written) return fail(written.error());
  return (*result)["success"].get<bool>() ? 0 : 1;
}

void add_replay_options(CLI::App& command, ReplayOptions& options, std::string& json) {
  command.add_option("--config", options.config, "the daemon's configuration")
      ->required()
      ->check(CLI::ExistingFile);
  command.add_option("--ranks", options.ranks, "ranks of each group")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  command
      .add_option("--pool-pages", options.pool_pages,
                  "a pool of exactly this many logical pages, without watermarks; pages of 16 KiB a shard")
      ->check(CLI::Range(1u, 64u << 20));
  command
      .add_option("--page-bytes", options.page_bytes,
                  fmt::format("bytes of a page's shard (default {}, with --pool-pages {})", kDefaultPageBytes,
                              kSmallPageBytes))
      ->transform(CLI::AsSizeValue(false));
  command.add_option("--limit", options.limit, "requests at most");
  command.add_option("--concurrency", options.concurrency, "requests of a group in work at once")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  command.add_option("--seed", options.conversations.seed, "of the generated conversations")
      ->capture_default_str();
  command.add_flag("--attach", options.attach, "use the daemon that runs already instead of starting one")
      ->excludes("--pool-pages");
  command.add_flag("--dump-check", options.dump_check, "run hicache-dump --check during and after the run");
  command.add_option("--device", options.device, "where the ranks' pages lie: host or cuda")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, DeviceKind>{{"host", DeviceKind::host}, {"cuda", DeviceKind::cuda}},
          CLI::ignore_case));
  command
      .add_option("--gpus", options.gpus,
                  "with --device cuda: the ranks of a group take as many GPUs in turn")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  command
      .add_option("--io-backend", options.io_backend,
                  "who moves the ranks' pages: direct (the daemon) or kernel (the ranks)")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, IoBackend>{{"direct", IoBackend::direct}, {"kernel", IoBackend::kernel}},
          CLI::ignore_case));
  command.add_option("--json", json, "write the results to this file, - for standard output");
}

}  // namespace

int main(int argc, char** argv) {
  install_interrupt_handler();
  CLI::App app{"Benchmarks of hicache. Every byte that a replay loads is compared with what it must be."};
  app.set_version_flag("--version", version_text("hicache-bench"));
  app.require_subcommand(1);
  int rc = 0;
  std::string json;
  ReplayOptions options;
  MicroOptions micro_options;

  CLI::App* replay_command =
      app.add_subcommand("replay", "replay a trace, or generated conversations, with engines of one kind");
  add_replay_options(*replay_command, options, json);
  Attention attention = Attention::mha;
  std::uint32_t engines = 1;
  replay_command
      ->add_option("--trace", options.trace,
                   "JSON lines with hash_ids; left out: conversations are generated")
      ->check(CLI::ExistingFile);
  replay_command->add_option("--attention", attention, "mha or mla")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, Attention>{{"mha", Attention::mha}, {"mla", Attention::mla}},
          CLI::ignore_case));
  replay_command->add_option("--engines", engines, "groups that replay side by side in one namespace")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  replay_command->add_flag("--controller", options.controller,
                           "through the prefix tree and the controller, one request at a time; reports what "
                           "each policy of the tree would find");
  replay_command
      ->add_option("--policy", options.policy, "with --controller, the tree's: lru, lfu, scan_resistant")
      ->needs("--controller")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, TreePolicy>{{"lru", TreePolicy::lru},
                                            {"lfu", TreePolicy::lfu},
                                            {"scan_resistant", TreePolicy::scan_resistant}},
          CLI::ignore_case));
  const auto storage =
      replay_command
          ->add_option("--storage", options.storage,
                       "with this storage backend, unbounded and asked for everything that the pool misses")
          ->excludes("--attach")
          ->excludes("--controller");
  replay_command->add_option("--storage-dir", options.storage_dir, "directory of its files")->needs(storage);
  replay_command
      ->add_flag("--storage-sync", options.storage_sync,
                 "begin a request when the pages of the last one are backed up")
      ->needs(storage);
  replay_command->callback([&] {
    if (options.controller) options.concurrency = 1;
    options.engines.assign(engines, attention);
    rc = replay(options, json);
  });

  CLI::App* conversations_command = app.add_subcommand(
      "conversations", "generated multi-turn conversations through one MHA group and one MLA group at once");
  add_replay_options(*conversations_command, options, json);
  conversations_command->callback([&] {
    options.engines = {Attention::mha, Attention::mla};
    rc = replay(options, json);
  });

  const auto add_micro = [&](const char* name, const char* text,
                             Result<nlohmann::json> (*run)(const MicroOptions&)) {
    CLI::App* command = app.add_subcommand(name, text);
    command->add_option("--seconds", micro_options.seconds, "of each measurement")
        ->check(CLI::Range(0.1, 600.0))
        ->capture_default_str();
    command->add_option("--json", json, "write the results to this file, - for standard output");
    command->callback([&, run] { rc = micro(run, micro_options, json); });
  };
  add_micro("rtt", "no-op round trips, fairness and the idle daemon, beside bare exchanges", run_rtt);
  add_micro("probe", "lookups without the daemon in an index of a million pages", run_probe);
  add_micro("ops", "page operations a second through the coordinator", run_ops);

#ifdef HICACHE_CUDA
  GpuCommands gpu_commands(app, [&](const Result<nlohmann::json>& result, const std::string& path) {
    rc = micro([&](const MicroOptions&) { return result; }, micro_options, path);
    const bool bad =
        result && (result->value("wrong_words", std::uint64_t{0}) > 0 || result->contains("failed"));
    if (bad) rc = 1;
  });
#endif
  RestartOptions restart_options;
  CLI::App* restart_command = app.add_subcommand(
      "restart", "kill a daemon with a full pool and measure how soon the next one serves its pages");
  restart_command->add_option("--pages", restart_options.pages, "ready pages in the pool")
      ->check(CLI::Range(1u, 8u << 20))
      ->capture_default_str();
  restart_command->add_option("--pool-bytes", restart_options.pool_bytes, "of the pool")
      ->transform(CLI::AsSizeValue(false))
      ->default_str("4GiB");
  restart_command->add_option("--page-bytes", restart_options.page_bytes, "of a page")
      ->transform(CLI::AsSizeValue(false))
      ->default_str("64KiB");
  restart_command->add_flag("--pinned", restart_options.pinned,
                            "the daemon pins the pool for the GPUs of this machine");
  restart_command->add_option("--json", json, "write the results to this file, - for standard output");
  restart_command->callback([&] { rc = judged(run_restart(restart_options), json); });

  PrefetchBenchOptions prefetch_options;
  CLI::App* prefetch_command = app.add_subcommand(
      "prefetch", "fetch a prefix from storage and measure when its first page could be used");
  prefetch_command->add_option("--pages", prefetch_options.pages, "of the prefix")
      ->check(CLI::Range(2u, 60'000u))
      ->capture_default_str();
  prefetch_command->add_option("--page-bytes", prefetch_options.page_bytes, "of a page")
      ->transform(CLI::AsSizeValue(false))
      ->default_str("128KiB");
  prefetch_command->add_option("--storage", prefetch_options.storage, "storage backend")
      ->capture_default_str();
  prefetch_command->add_option("--storage-dir", prefetch_options.storage_dir, "directory of its files");
  prefetch_command
      ->add_option("--memory-delay-us", prefetch_options.memory_delay_us,
                   "time that the backend memory takes for a page")
      ->capture_default_str();
  prefetch_command->add_option("--json", json, "write the results to this file, - for standard output");
  prefetch_command->callback([&] { rc = judged(run_prefetch_bench(prefetch_options), json); });

  ChaosOptions chaos_options;
  CLI::App* chaos_command = app.add_subcommand(
      "chaos", "two engines of four ranks under load while ranks and the daemon are killed and stopped");
  chaos_command->add_option("--minutes", chaos_options.minutes, "how long")
      ->check(CLI::Range(0.05, 1440.0))
      ->capture_default_str();
  chaos_command->add_option("--seed", chaos_options.seed, "of the killer's choices")->capture_default_str();
  chaos_command->add_option("--json", json, "write the results to this file, - for standard output");
  chaos_command->callback([&] { rc = judged(run_chaos(chaos_options), json); });

  StorageBenchOptions storage_options;
  std::vector<std::string> also;
  CLI::App* storage_command = app.add_subcommand(
      "storage", "write and read GB/s and CPU of the storage backends beside a bare copy to the same disk");
  storage_command->add_option("--dir", storage_options.directory, "a directory on the disk to be measured")
      ->required()
      ->check(CLI::ExistingDirectory);
  storage_command->add_option("--bytes", storage_options.bytes, "moved each way in a measurement")
      ->transform(CLI::AsSizeValue(false))
      ->default_str("512MiB");
  storage_command->add_option("--page-bytes", storage_options.page_bytes, "sizes of pages")
      ->transform(CLI::AsSizeValue(false))
      ->delimiter(',')
      ->default_str("128KiB,1MiB,4MiB");
  storage_command->add_option("--repeats", storage_options.repeats, "of each measurement, in turn")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  storage_command->add_option("--engine", storage_options.engine, "of the files: auto, io_uring or threads")
      ->check(CLI::IsMember({"auto", "io_uring", "threads"}))
      ->capture_default_str();
  storage_command->add_option("--also", also, "another backend: NAME={its settings as JSON}");
  storage_command->add_option("--json", json, "write the results to this file, - for standard output");
  storage_command->callback([&] {
    for (const std::string& text : also) {
      const auto at = text.find('=');
      storage_options.also.emplace_back(text.substr(0, at),
                                        at == std::string::npos ? "{}" : text.substr(at + 1));
    }
    rc = judged(run_storage(storage_options), json);
  });

  TreeBenchOptions tree_options;
  CLI::App* tree_command = app.add_subcommand(
      "tree", "costs of the prefix tree by its number of leaves; with a trace, hit rates by policy");
  tree_command->add_option("--trace", tree_options.trace, "JSON lines with hash_ids")
      ->check(CLI::ExistingFile);
  tree_command->add_option("--limit", tree_options.limit, "requests of the trace at most");
  tree_command->add_option("--json", json, "write the results to this file, - for standard output");
  tree_command->callback([&] {
    const auto result = run_tree_bench(tree_options);
    const Outcome written = result ? write_json(json, *result) : Outcome(result.error());
    rc = written ? 0 : fail(written.error());
  });

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : kUsage;
  }
  return rc;
}
