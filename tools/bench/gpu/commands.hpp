// hicache-bench's subcommands that need a GPU: transfer and layerwise.
#pragma once

#include <CLI/CLI.hpp>

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "tools/bench/gpu/transfer_bench.hpp"

namespace hicache::bench {

class GpuCommands {
 public:
  // Called with a command's result and where its JSON goes.
  using Finish = std::function<void(const Result<nlohmann::json>&, const std::string&)>;

  // Must live until the command line was parsed and run.
  GpuCommands(CLI::App& app, Finish finish) : finish_(std::move(finish)) {
    add_transfer(app);
    add_layerwise(app);
  }
  GpuCommands(const GpuCommands&) = delete;
  GpuCommands& operator=(const GpuCommands&) = delete;

 private:
  static CLI::CheckedTransformer layouts() {
    return CLI::CheckedTransformer(std::map<std::string, BufferLayout>{{"together", BufferLayout::together},
                                                                       {"separate", BufferLayout::separate},
                                                                       {"blocks", BufferLayout::blocks}},
                                   CLI::ignore_case);
  }
  void add_transfer(CLI::App& app) {
    CLI::App* command =
        app.add_subcommand("transfer", "pages between GPU memory and the pool, beside a single large copy");
    command->add_option("--shapes", transfer_.shapes, "8B-tp1, 70B-tp8, MLA")->delimiter(',');
    command
        ->add_option("--methods", transfer_.methods, "values of transfer.method; kernel: io_backend kernel")
        ->delimiter(',');
    command->add_option("--page-tokens", transfer_.page_tokens, "tokens of a page")->delimiter(',');
    command->add_option("--runs", transfer_.runs, "lengths of runs of consecutive device pages")
        ->delimiter(',');
    command->add_option("--layouts", transfer_.layouts, "together, separate, blocks")
        ->delimiter(',')
        ->transform(layouts());
    command->add_option("--loads", transfer_.loads, "alone, gemm, stream, silent (a rank that never signals)")
        ->delimiter(',')
        ->transform(
            CLI::CheckedTransformer(std::map<std::string, LoadKind>{{"alone", LoadKind::none},
                                                                    {"gemm", LoadKind::gemm},
                                                                    {"stream", LoadKind::stream},
                                                                    {"silent", LoadKind::silent_rank}},
                                    CLI::ignore_case));
    command->add_option("--bytes", transfer_.bytes, "in flight")
        ->transform(CLI::AsSizeValue(false))
        ->capture_default_str();
    command->add_option("--operations", transfer_.operations, "that share them")
        ->check(CLI::Range(1, 64))
        ->capture_default_str();
    command->add_option("--gpus", transfer_.gpus, "ranks of a group, each on a GPU of its own")
        ->check(CLI::Range(1, 64))
        ->capture_default_str();
    command->add_option("--repeats", transfer_.repeats, "of which the median counts")
        ->check(CLI::Range(1, 1000))
        ->capture_default_str();
    command->add_option("--json", json_, "write the results to this file, - for standard output");
    command->add_option("--daemon", transfer_.daemon, "JSON merged into the daemon's configuration");
    command->callback([this] { finish_(run_transfer(transfer_), json_); });
  }
  void add_layerwise(CLI::App& app) {
    CLI::App* command = app.add_subcommand(
        "layerwise", "time to the first and the last layer of loads, and what a fence costs");
    command->add_option("--shape", layerwise_.shape, "8B-tp1, 70B-tp8 or MLA")->capture_default_str();
    command->add_option("--method", layerwise_.method, "value of transfer.method")->capture_default_str();
    command->add_option("--page-tokens", layerwise_.page_tokens, "tokens of a page")->capture_default_str();
    command->add_option("--pages", layerwise_.pages, "pages of a load")->delimiter(',');
    command->add_option("--layouts", layerwise_.layouts, "together, separate, blocks")
        ->delimiter(',')
        ->transform(layouts());
    command->add_option("--gpus", layerwise_.gpus, "ranks of a group, each on a GPU of its own")
        ->check(CLI::Range(1, 64))
        ->capture_default_str();
    command->add_option("--repeats", layerwise_.repeats, "of which the median counts")
        ->check(CLI::Range(1, 1000))
        ->capture_default_str();
    command->add_option("--json", json_, "write the results to this file, - for standard output");
    command->add_option("--daemon", layerwise_.daemon, "JSON merged into the daemon's configuration");
    command->callback([this] { finish_(run_layerwise(layerwise_), json_); });
  }

  Finish finish_;
  TransferOptions transfer_;
  LayerwiseOptions layerwise_;
  std::string json_;
};

}  // namespace hicache::bench
