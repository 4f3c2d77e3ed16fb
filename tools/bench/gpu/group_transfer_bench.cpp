// `hicache-bench transfer --gpus N`: a TP group with a rank on each GPU.
#include <fmt/format.h>
#include <unistd.h>

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

constexpr useconds_t kLoadWindowUs = 250'000;  // over which the rate of an undisturbed load is taken

enum class Move : std::size_t { write_alone, write, load, load_fenced, count_ };
constexpr std::array<const char*, static_cast<std::size_t>(Move::count_)> kMoveNames{
    "write, one rank", "write", "load", "load+fences"};

struct Samples {
  std::vector<double> total_gbps;
  std::vector<std::vector<double>> rank_gbps;  // by rank
  double load_steps = 0;                       // of this rank's GPU
  double ns = 0;
};

// One shape, page size, allocation layout and run length, on one rank.
class GroupCase {
 public:
  GroupCase(GroupMember& member, const Gpu& gpu, GpuRank& rank, GpuRank* alone, const NamespaceSpec& spec,
            const TransferOptions& options, std::uint32_t run, std::uint64_t id)
      : member_(member),
        gpu_(gpu),
        rank_(rank),
        alone_(alone),
        spec_(spec),
        options_(options),
        device_(shuffled_pages(rank.memory().pages(), run)),
        keys_(made_up_keys(id, rank.memory().pages())) {
    for (std::size_t i = 0; i < keys_.size(); ++i) keyed_.push_back({keys_[i], device_[i]});
  }

  Outcome run(const GroupCopyRates& single, const ResultSink& send, const Json& labels) {
    if (Outcome filled = fill(rank_, shard()); !filled) return filled;
    if (alone_ != nullptr) {
      if (Outcome filled = fill(*alone_, 0); !filled) return filled;
    }
    for (const LoadKind kind : options_.loads) {
      if (Outcome done = beside(kind, single, send, labels); !done) return done;
    }
    return success();
  }

 private:
  [[nodiscard]] bool shared() const { return spec_.attention == Attention::mla; }
  [[nodiscard]] std::uint32_t shard() const { return shared() ? 0 : member_.rank(); }
  [[nodiscard]] double rank_bytes() const {
    return static_cast<double>(keys_.size()) * static_cast<double>(spec_.shard_bytes());
  }
  Outcome fill(GpuRank& rank, std::uint32_t shard) {
    if (Outcome filled = rank.memory().fill(keyed_, shard); !filled) return filled;
    return rank.memory().synchronize();
  }

  struct Part {
    std::uint32_t first = 0;
    std::uint32_t count = 0;
  };
  [[nodiscard]] std::vector<Part> parts() const {
    std::vector<Part> out;
    const auto all = static_cast<std::uint32_t>(keys_.size());
    const std::uint32_t size = std::max(1u, (all + options_.operations - 1) / options_.operations);
    for (std::uint32_t at = 0; at < all; at += size) out.push_back({at, std::min(size, all - at)});
    return out;
  }

  // Posts all operations and waits for all.
  Outcome move(GpuRank& rank, LeaseId lease, bool write, bool fenced) {
    std::vector<std::pair<Result<Ticket>, std::uint32_t>> posted;
    std::uint32_t turn = 0;
    for (const Part& part : parts()) {
      const auto pages = std::span<const DevicePage>(device_).subspan(part.first, part.count);
      std::optional<LayerFence> fence;
      if (fenced) fence = LayerFence{turn++ % kProducerSlots, rank.next_fence()};
      posted.emplace_back(write ? rank.session().write(lease, part.first, pages)
                                : rank.session().load(lease, part.first, pages, fence),
                          part.count);
    }
    Outcome outcome = success();
    for (const auto& [ticket, count] : posted) {
      const Outcome ended = rank.wait(ticket, count);
      if (outcome) outcome = ended;
    }
    return outcome;
  }

  // A lease, the movement at the same time on all ranks, and the release.
  Result<GroupTimes> lease_and_move(std::uint32_t hits, bool write, bool fenced) {
    const auto lease = rank_.reserve(keys_, hits);
    if (!lease) return lease.error();
    auto times = member_.timed([&] { return move(rank_, *lease, write, fenced); });
    if (!times) return times;
    if (Outcome released = rank_.release(*lease); !released) return released.error();
    return times;
  }
  Outcome clear() {
    return member_.on_first([&] { return rank_.clear(); });
  }

  void take(Samples& samples, const GroupTimes& times, double total_bytes, const GpuLoad* load,
            std::uint64_t steps) const {
    samples.total_gbps.push_back(total_bytes / times.makespan_ns);
    samples.rank_gbps.resize(member_.size());
    for (std::uint32_t r = 0; r < member_.size(); ++r)
      samples.rank_gbps[r].push_back(rank_bytes() / times.own_ns[r]);
    if (load == nullptr) return;
    samples.load_steps += static_cast<double>(load->steps() - steps);
    samples.ns += times.own_ns[member_.rank()];
  }

  Outcome iterate(const GpuLoad* load, bool counts, std::array<Samples, kMoveNames.size()>& samples) {
    const double total = shared() ? rank_bytes() : rank_bytes() * member_.size();
    const auto hits = static_cast<std::uint32_t>(keys_.size());
    const auto one = [&](Move what, const std::function<Result<GroupTimes>()>& body,
                         double bytes) -> Outcome {
      const std::uint64_t steps = load == nullptr ? 0 : load->steps();
      const auto times = body();
      if (!times) return times.error();
      if (counts) take(samples[static_cast<std::size_t>(what)], *times, bytes, load, steps);
      return success();
    };
    if (shared()) {
      const Outcome done = one(
          Move::write_alone, [&] { return write_alone(); }, rank_bytes());
      if (!done) return done;
    }
    if (Outcome done = one(
            Move::write, [&] { return lease_and_move(0, true, false); }, total);
        !done)
      return done;
    if (Outcome done = one(
            Move::load, [&] { return lease_and_move(hits, false, false); }, total);
        !done)
      return done;
    if (Outcome done = one(
            Move::load_fenced, [&] { return lease_and_move(hits, false, true); }, total);
        !done)
      return done;
    return clear();
  }

  // What one rank alone reaches, with all of the pages.
  Result<GroupTimes> write_alone() {
    std::optional<LeaseId> lease;
    if (alone_ != nullptr) {
      const auto reserved = alone_->reserve(keys_, 0);
      if (!reserved) return reserved.error();
      lease = *reserved;
    }
    double own_ns = 0;
    if (Outcome met = member_.meet(); !met) return met.error();
    if (lease) {
      const std::uint64_t start = monotonic_ns();
      if (Outcome done = move(*alone_, *lease, true, false); !done) return done.error();
      own_ns = static_cast<double>(monotonic_ns() - start);
      if (Outcome released = alone_->release(*lease); !released) return released.error();
    }
    const auto all = member_.share(own_ns);
    if (!all) return all.error();
    if (Outcome cleared = clear(); !cleared) return cleared.error();
    return GroupTimes{all->front(), std::vector<double>(member_.size(), all->front())};
  }

  // Loads over spoiled pages, and looks at every byte on every rank.
  Outcome check_bytes(double& words, double& wrong) {
    if (const auto written = lease_and_move(0, true, false); !written) return written.error();
    for (const bool fenced : {false, true}) {
      if (Outcome done = rank_.memory().poison(keyed_); !done) return done;
      if (Outcome done = rank_.memory().synchronize(); !done) return done;
      const auto loaded = lease_and_move(static_cast<std::uint32_t>(keys_.size()), false, fenced);
      if (!loaded) return loaded.error();
      const auto found = rank_.memory().verify(keyed_, shard());
      if (!found) return found.error();
      const auto all_words = member_.share(static_cast<double>(found->words));
      if (!all_words) return all_words.error();
      const auto all_wrong = member_.share(static_cast<double>(found->wrong));
      if (!all_wrong) return all_wrong.error();
      for (const double n : *all_words) words += n;
      for (const double n : *all_wrong) wrong += n;
    }
    return clear();
  }

  [[nodiscard]] static double load_rate(const GpuLoad& load) {
    const std::uint64_t steps = load.steps();
    const std::uint64_t start = monotonic_ns();
    ::usleep(kLoadWindowUs);
    return static_cast<double>(load.steps() - steps) * 1e9 / static_cast<double>(monotonic_ns() - start);
  }

  Outcome beside(LoadKind kind, const GroupCopyRates& single, const ResultSink& send, const Json& labels) {
    std::unique_ptr<GpuLoad> load;
    double undisturbed = 0;
    if (kind != LoadKind::none) {
      auto started = GpuLoad::start(gpu_, kind);
      if (!started) return started.error();
      load = std::move(*started);
      ::usleep(kLoadWindowUs);
      if (Outcome met = member_.meet(); !met) return met;
      undisturbed = load_rate(*load);
    }
    std::array<Samples, kMoveNames.size()> samples;
    for (std::uint32_t i = 0; i <= options_.repeats; ++i) {
      if (Outcome done = iterate(load.get(), i > 0, samples); !done) return done;  // the first warms up
    }
    double words = 0;
    double wrong = 0;
    if (kind == LoadKind::none) {
      if (Outcome checked = check_bytes(words, wrong); !checked) return checked;
    }
    if (load != nullptr) {
      if (Outcome met = member_.meet(); !met) return met;
      undisturbed = (undisturbed + load_rate(*load)) / 2;
      if (load->failed()) return Error{Status::system_error, "the load on the GPU failed", 0};
    }
    for (std::size_t i = 0; i < samples.size(); ++i) {
      if (samples[i].total_gbps.empty()) continue;
      const auto what = static_cast<Move>(i);
      const bool writes = what == Move::write || what == Move::write_alone;
      Json json = labels;
      json["load"] = name_of(kind);
      json["move"] = kMoveNames[i];
      json["total_gbps"] = median_of(samples[i].total_gbps);
      json["share"] = median_of(samples[i].total_gbps) / (writes ? single.to_host : single.to_device);
      for (const auto& own : samples[i].rank_gbps) json["rank_gbps"].push_back(median_of(own));
      if (load != nullptr) {
        const auto kept = member_.share(samples[i].load_steps * 1e9 / samples[i].ns / undisturbed);
        if (!kept) return kept.error();
        json["compute_kept"] = *kept;
      } else {
        json["verified_words"] = words;
        json["wrong_words"] = wrong;
      }
      send(json);
    }
    return success();
  }

  GroupMember& member_;
  const Gpu& gpu_;
  GpuRank& rank_;
  GpuRank* const alone_;  // a rank of its own namespace on the first GPU; null elsewhere
  const NamespaceSpec spec_;
  const TransferOptions& options_;
  std::vector<DevicePage> device_;
  std::vector<PrefixHash> keys_;
  std::vector<KeyedPage> keyed_;
};

// The cases of one way of loading pages that all ranks need.
Outcome run_cases(GroupMember& member, const Gpu& gpu, const TransferOptions& options,
                  const std::string& socket_path, const std::string& mla, const ResultSink& send) {
  const auto single = measure_copies_at_once(member, gpu, options.bytes);
  if (!single) return single.error();
  send({{"single_copies",
         {{"gpu", gpu.name()}, {"to_device_gbps", single->to_device}, {"to_host_gbps", single->to_host}}}});
  std::uint64_t id = 0;
  for (const std::string& shape_name : options.shapes) {
    const auto shape = find_shape(shape_name);
    if (!shape) return shape.error();
    // Only pages that all ranks need can be loaded in two ways.
    if (shape->attention != Attention::mla && mla != "direct") continue;
    for (const std::uint32_t tokens : options.page_tokens) {
      NamespaceSpec spec = make_spec(*shape, tokens);
      const auto pages = static_cast<std::uint32_t>(options.bytes / spec.shard_bytes());
      for (const BufferLayout layout : options.layouts) {
        std::unique_ptr<GpuRank> alone;
        if (shape->attention == Attention::mla && member.first()) {
          auto rank = GpuRank::attach(gpu, socket_path, spec, pages, layout);
          if (!rank) return rank.error();
          alone = std::move(*rank);
        }
        spec.tp_size = member.size();
        const GroupPlace place{fmt::format("group-{}-{}-{}", shape_name, tokens, name_of(layout)),
                               member.rank()};
        auto rank = GpuRank::attach(gpu, socket_path, spec, pages, layout, place);
        if (!rank) return rank.error();
        if (Outcome met = member.meet(); !met) return met;
        for (const std::uint32_t run : options.runs) {
          const Json labels{{"shape", shape_name},
                            {"page_tokens", tokens},
                            {"piece_bytes", spec.piece_bytes()},
                            {"pages", pages},
                            {"layout", name_of(layout)},
                            {"run", run},
                            {"mla", shape->attention == Attention::mla ? mla : "-"}};
          GroupCase one(member, gpu, **rank, alone.get(), spec, options, run, ++id);
          if (const Outcome done = one.run(*single, send, labels); !done) {
            return Error{done.status(),
                         fmt::format("{} page {} {} run {}: {}", shape_name, tokens, name_of(layout), run,
                                     done.error().message),
                         0};
          }
        }
        // Ranks leave together: the first one to go breaks the group.
        if (Outcome met = member.meet(); !met) return met;
        spec.tp_size = 1;
      }
    }
  }
  return success();
}

void print_row(const Json& row) {
  std::string ranks;
  for (const Json& rate : row["rank_gbps"])
    ranks += fmt::format("{}{:.1f}", ranks.empty() ? "" : " ", rate.get<double>());
  std::string kept;
  for (const Json& share : row.value("compute_kept", Json::array()))
    kept += fmt::format("{}{:.3f}", kept.empty() ? "" : " ", share.get<double>());
  fmt::print("{:<8} {:>5} {:<8} {:>4} {:<8} {:<6} {:<15} {:>7.1f} {:>6.3f}  {:<12} {:<12} {}\n",
             row["shape"].get<std::string>(), row["page_tokens"].get<std::uint32_t>(),
             row["layout"].get<std::string>(), row["run"].get<std::uint32_t>(), row["mla"].get<std::string>(),
             row["load"].get<std::string>(), row["move"].get<std::string>(), row["total_gbps"].get<double>(),
             row["share"].get<double>(), ranks, kept.empty() ? "-" : kept,
             !row.contains("wrong_words")            ? ""
             : row["wrong_words"].get<double>() == 0 ? "right"
                                                     : "WRONG");
  std::fflush(stdout);
}

}  // namespace

Result<Json> run_group_transfer(const TransferOptions& options) {
  Json json{{"machine", Machine::here().json()}, {"gpus", options.gpus},       {"bytes", options.bytes},
            {"operations", options.operations},  {"repeats", options.repeats}, {"rows", Json::array()}};
  std::uint64_t wrong = 0;
  std::uint64_t most_ranks = 1;
  for (const std::string& shape : options.shapes) {
    const auto found = find_shape(shape);
    if (!found) return found.error();
    if (found->attention == Attention::mha) most_ranks = options.gpus;
  }
  fmt::print("{:<8} {:>5} {:<8} {:>4} {:<8} {:<6} {:<15} {:>7} {:>6}  {:<12} {:<12} {}\n", "shape", "page",
             "layout", "run", "mla", "load", "move", "GB/s", "share", "each rank", "compute", "bytes");
  for (const char* mla : {"direct", "exchange"}) {
    Json patch = Json::parse(options.daemon, nullptr, false);
    if (!patch.is_object())
      return Error{Status::invalid_argument, fmt::format("{}: expected a JSON object", options.daemon), 0};
    patch.merge_patch({{"mla", {{"load", mla}}}});
    const std::uint64_t pool = options.bytes * most_ranks;
    auto daemon = start_cuda_daemon(pool + pool / 2, options.methods.front(), patch.dump());
    if (!daemon) return daemon.error();
    const std::string socket_path = (*daemon)->socket_path();
    const Outcome done = run_gpu_group(
        options.gpus, options.gpus,
        [&](GroupMember& member, const Gpu& gpu, const ResultSink& send) {
          return run_cases(member, gpu, options, socket_path, mla, send);
        },
        [&](const Json& row) {
          if (row.contains("single_copies")) {
            json["single_copies"][mla] = row["single_copies"];
            fmt::print("single copies at once: {}\n", row["single_copies"].dump());
            return;
          }
          if (row.value("wrong_words", 0.0) > 0) ++wrong;
          print_row(row);
          json["rows"].push_back(row);
        });
    if (const auto status = control(socket_path, {"status"})) {
      const Json parsed = Json::parse(*status, nullptr, false);
      if (parsed.is_object()) json["daemon_after"][mla] = parsed.value("cuda", Json::object());
    }
    if (!done) {
      json["failed"][mla] = done.error().message;
      fmt::print("{}: FAILED: {}\n", mla, done.error().message);
    }
    if (const Outcome stopped = (*daemon)->stop(); !stopped) return stopped.error();
  }
  json["wrong_words"] = wrong;
  return json;
}

}  // namespace hicache::bench
