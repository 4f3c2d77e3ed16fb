#include "tools/bench/controller_worker.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "hicache/controller/controller.hpp"
#include "hicache/controller/prefix_tree.hpp"
#include "shm/clock.hpp"
#include "tools/bench/bench_model.hpp"
#include "tools/bench/page_pattern.hpp"
#include "tools/bench/replay_rank.hpp"

namespace hicache::bench {
namespace {

constexpr std::uint32_t kWaitMs = 30'000;
constexpr std::uint32_t kTurnMs = 200;
constexpr std::uint64_t kUnlimited = 1ull << 40;

class ControllerWorker : public ReplayRank {
 public:
  ControllerWorker(const ReplayPlan& plan, const GroupPlan& group, std::uint32_t tp_rank,
                   const Workload& workload, Board& board)
      : ReplayRank(plan, group, tp_rank, workload, board), digest_(group.spec.digest()) {}

  Outcome run() {
    if (const Outcome attached = attach(); !attached) return attached;
    if (!board_.wait_for_start(mine_)) return success();
    for (std::size_t request = 0; request < workload_.size() && !board_.aborted(); ++request) {
      const std::uint64_t start = monotonic_ns();
      if (const Outcome served = serve(workload_.keys(request)); !served) return served;
      latency(Timed::request).record(monotonic_ns() - start);
      mine_.done.store(request + 1, std::memory_order_release);  // SYNC board-done
      board_.announce();
    }
    // A rank that leaves ends its group: nobody goes before all have finished.
    while (!board_.aborted() && group_done() < workload_.size()) {
      const std::uint32_t seen = board_.turn.load(std::memory_order_seq_cst);  // SYNC board-turn
      if (group_done() < workload_.size()) board_.sleep(seen, kTurnMs);
    }
    session_->close();
    return success();
  }

 private:
  Outcome attach() {
    if (const Outcome attached = attach_session(); !attached) return attached;
    auto memory = DeviceMemory::create(group_.spec, workload_.longest());
    if (!memory) return memory.error();
    memory_.emplace(std::move(*memory));
    if (const Outcome registered = memory_->register_with(*session_); !registered) return registered;
    const std::uint32_t page_tokens = group_.spec.page_tokens;
    auto device = TokenSlots::create(std::uint64_t{workload_.longest()} * page_tokens, page_tokens);
    if (!device) return device.error();
    device_ = std::move(*device);
    ControllerOptions controller_options;
    controller_options.spec = group_.spec;
    controller_options.host_tokens = plan_.host_tokens * page_tokens;
    auto controller = HiCacheController::create(*session_, *device_, controller_options);
    if (!controller) return controller.error();
    controller_ = std::move(*controller);
    PrefixTreeOptions tree_options;
    tree_options.page_tokens = page_tokens;
    tree_options.load_back_threshold = 1;
    tree_options.eviction = plan_.policy;
    tree_options.ghosts = plan_.host_tokens;
    tree_.emplace(tree_options, *controller_);
    return success();
  }

  Outcome serve(std::span<const PrefixHash> keys) {
    const std::uint32_t page_tokens = group_.spec.page_tokens;
    const PrefixMatch found = tree_->match(keys);
    std::vector<std::uint64_t> slots;
    if (found.host_tokens > 0) {
      auto back = tree_->load_back(found.host_node, kUnlimited);
      if (back) {
        slots = std::move(back->device_slots);
        if (const Outcome loaded = finish_load(keys, slots); !loaded) return loaded;
      } else if (back.status() != Status::not_found) {
        return back.error();
      }
    }
    const std::uint64_t hits = slots.size() / page_tokens;
    const auto missing = keys.subspan(hits);
    const auto fresh = device_->alloc(missing.size() * page_tokens);
    if (!fresh) return fresh.error();
    for (std::size_t i = 0; i < missing.size(); ++i) {
      for_each_piece(page_of(*fresh, i), missing[i], fill_piece);
    }
    slots.insert(slots.end(), fresh->begin(), fresh->end());
    const std::uint64_t write_start = monotonic_ns();
    const auto inserted = tree_->insert(keys, slots);
    if (!inserted) return inserted.error();
    if (!inserted->duplicates.empty()) {
      return Error{Status::internal, "the tree had pages on the device that it did not match", 0};
    }
    const auto acks = controller_->drain();
    if (!acks) return acks.error();
    for (const HiCacheAck& ack : *acks) take(ack, write_start);
    tree_->apply(*acks);
    if (tree_->evict(kUnlimited); tree_->device_tokens() != 0) {
      return Error{Status::internal, "the device could not be emptied after a request", 0};
    }
    add(mine_.counts.requests, 1);
    add(mine_.counts.pages, keys.size());
    add(mine_.counts.hits, hits);
    if (missing.empty()) add(mine_.counts.full_hits, 1);
    return success();
  }

  Outcome finish_load(std::span<const PrefixHash> keys, const std::vector<std::uint64_t>& slots) {
    const std::uint64_t pages = slots.size() / group_.spec.page_tokens;
    for (std::size_t i = 0; i < pages; ++i) {
      for_each_piece(page_of(slots, i), keys[i],
                     [](std::span<std::uint8_t> piece, std::uint64_t) { poison(piece); });
    }
    const std::uint64_t start = monotonic_ns();
    const auto consumer = controller_->start_loading();
    if (!consumer) return consumer.error();
    LayerDoneCounter& counter = controller_->layer_counter();
    if (const Outcome set = counter.set_consumer(*consumer); !set) return set;
    for (std::uint32_t layer = 0; layer < group_.spec.layers; ++layer) {
      if (const Outcome waited = counter.wait_until(layer, kWaitMs); !waited) return waited;
    }
    latency(Timed::load).record(monotonic_ns() - start);
    mine_.load_busy_ns += monotonic_ns() - start;
    std::uint64_t words = 0;
    std::uint64_t wrong = 0;
    for (std::size_t i = 0; i < pages; ++i) {
      for_each_piece(page_of(slots, i), keys[i], [&](std::span<std::uint8_t> piece, std::uint64_t base) {
        wrong += count_wrong_words(piece, base);
        words += piece.size() / sizeof(std::uint64_t);
      });
    }
    add(mine_.counts.verified_words, words);
    add(mine_.counts.verify_errors, wrong);
    return success();
  }

  void take(const HiCacheAck& ack, std::uint64_t write_start) {
    if (ack.kind == OperationKind::load) {
      add(mine_.counts.bytes_loaded, ack.bytes);
    } else {
      latency(Timed::write).record(monotonic_ns() - write_start);
      mine_.write_busy_ns += monotonic_ns() - write_start;
      add(mine_.counts.bytes_written, ack.bytes);
      add(mine_.counts.written, ack.host_tokens / group_.spec.page_tokens);
      add(mine_.counts.dropped, (ack.tokens - ack.host_tokens) / group_.spec.page_tokens);
    }
    if (ack.local != Status::ok) {
      add(mine_.counts.failed_operations, 1);
      mine_.fail(fmt::format("sequence {} ended with {}", ack.sequence, to_string(ack.local)));
    }
  }

  [[nodiscard]] DevicePage page_of(const std::vector<std::uint64_t>& slots, std::size_t page) const {
    const std::uint32_t page_tokens = group_.spec.page_tokens;
    return DevicePage{static_cast<std::uint32_t>(slots[page * page_tokens] / page_tokens)};
  }
  template <class Visit>
  void for_each_piece(DevicePage page, const PrefixHash& key, Visit&& visit) {
    for (const DeviceTensor& tensor : memory_->geometry().tensors) {
      visit(memory_->piece(tensor, page), piece_base({digest_, key, shard_, tensor.layer, tensor.kind}));
    }
  }

  PrefixHash digest_;
  std::optional<DeviceMemory> memory_;
  std::unique_ptr<TokenSlots> device_;
  std::unique_ptr<HiCacheController> controller_;
  std::optional<PrefixTree> tree_;
};

}  // namespace

int run_controller_rank(const ReplayPlan& plan, const GroupPlan& group, std::uint32_t tp_rank,
                        const Workload& workload, Board& board) {
  ControllerWorker worker(plan, group, tp_rank, workload, board);
  return worker.report(worker.run());
}

}  // namespace hicache::bench
