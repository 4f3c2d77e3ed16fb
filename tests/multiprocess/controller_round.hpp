// A round of random work on a group of rank processes, each with a prefix tree and its model
// (checked_tree.hpp): every decision is compared between the ranks, every page with what it must hold, every
// slot with the books.
#pragma once

#include <algorithm>
#include <atomic>
#include <csignal>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/checked_tree.hpp"
#include "tests/support/controller_rank.hpp"

namespace hicache::test {

constexpr std::uint32_t kRanks = 3;
constexpr const char* kStarvedPool =
    R"({"pool": {"max_pages": 60}, "eviction": {"high_watermark": 0, "low_watermark": 0}})";
constexpr std::uint64_t kHostTokens = 400;

struct Meeting {
  std::atomic<std::uint32_t> leaving{0};
  std::atomic<std::uint32_t> ready{0};
  std::atomic<bool> failed{false};
};

// What must hold of the pages, without a tree: a page is on the device after it was computed or loaded, in
// the slots given then, until those slots are used again.
class Model {
 public:
  void placed(std::span<const PrefixHash> hashes, const std::vector<std::uint64_t>& slots,
              std::uint32_t page_tokens) {
    for (std::size_t i = 0; i * page_tokens < slots.size(); ++i) {
      at_[slots[i * page_tokens]] = hashes[i].words;
    }
  }
  [[nodiscard]] bool agrees(std::span<const PrefixHash> hashes, const std::vector<std::uint64_t>& slots,
                            std::uint32_t page_tokens) const {
    for (std::size_t i = 0; i * page_tokens < slots.size(); ++i) {
      const auto found = at_.find(slots[i * page_tokens]);
      if (found == at_.end() || found->second != hashes[i].words) return false;
    }
    return true;
  }
  void clear() { at_.clear(); }

 private:
  std::map<std::uint64_t, std::array<std::uint64_t, 4>> at_;  // first slot of a page -> its hash
};

class Worker {
 public:
  Worker(const TestDaemon& daemon, std::uint32_t rank, unsigned seed, WritePolicy policy, TreePolicy eviction)
      : daemon_(daemon),
        rank_(rank),
        random_(seed),
        noise_(seed ^ (rank * 7919u + 1)),
        r_(daemon, rank, small_spec(Attention::mha, kRanks), {}, 0, kHostTokens),
        tree_(options(policy, eviction), *r_.controller) {}

  static PrefixTreeOptions options(WritePolicy policy, TreePolicy eviction) {
    PrefixTreeOptions o;
    o.page_tokens = 4;
    o.write_policy = policy;
    o.eviction = eviction;
    o.load_back_threshold = 8;
    o.pinnable_tokens = 24;
    return o;
  }

  // Lines of decisions. `dies_at`: the step at which this rank kills itself.
  void run(std::uint32_t steps, std::uint32_t dies_at) {
    for (std::uint32_t step = 0; step < steps; ++step) {
      if (step == dies_at) ::kill(::getpid(), SIGKILL);
      if (noise_() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(noise_() % 2000));
      out_ << step << ':';
      one_step(step);
      out_ << '\n';
      std::fwrite(out_.str().data(), 1, out_.str().size(), stdout);
      out_.str("");
    }
    unlock_all();
    tree_.apply(TestRank::take(r_.controller->drain()));
    verify("at the end");
  }
  // After the group broke: everything comes back.
  void reset_after_loss() {
    tree_.reset();
    locked_.clear();
    TestRank::take(r_.controller->reset());
    if (r_.device->available() != r_.device->size()) throw std::logic_error("device slots are lost");
    if (r_.controller->host_pages().available() != kHostTokens) throw std::logic_error("handles are lost");
  }

 private:
  std::uint32_t pick(std::uint32_t n) { return static_cast<std::uint32_t>(random_() % n); }

  std::vector<PrefixHash> some_prompt() {
    auto hashes = prompt(pick(4), 1 + pick(8));
    for (std::uint32_t page = pick(6); page > 0; --page) {
      const std::vector<std::uint32_t> tokens(4, 1000 + pick(3));
      hashes.push_back(hash_page(tokens, hashes.back()));
    }
    return hashes;
  }

  void one_step(std::uint32_t step) {
    CheckedTree& tree = tree_;
    for (const HiCacheAck& ack : TestRank::take(r_.controller->check_events())) {
      out_ << " ack " << ack.node_ids[0] << ' ' << to_string(ack.status) << ' ' << ack.host_tokens;
      tree.apply(ack);
    }
    const auto hashes = some_prompt();
    const std::uint32_t amount = 4 * (1 + pick(24));
    switch (const std::uint32_t what = pick(16)) {
      case 0:
        out_ << " evict " << tree.evict(amount);
        break;
      case 1:
        out_ << " evict_host " << tree.evict_host(amount);
        break;
      case 2:
        out_ << " split " << tree.match(std::span(hashes).first(1 + hashes.size() / 2)).device_node;
        break;
      case 3:
        out_ << " pin " << to_string(tree.pin(hashes, step + 40).status());
        break;
      case 4:
        // The pool loses pages behind everybody's back, at a moment that is each rank's own.
        if (rank_ == step % kRanks) static_cast<void>(control(daemon_.socket_path(), {"evict", "9"}));
        break;
      case 5:
        abort_load(hashes);
        break;
      case 6:
        if (pick(12) == 0) reset();
        break;
      default:
        request(hashes, what == 7);
    }
    tree.expire_pins(step);
    if (locked_.size() > 3) unlock_one();
    verify("step");
  }

  void request(const std::vector<PrefixHash>& hashes, bool chunked) {
    CheckedTree& tree = tree_;
    if (pick(3) == 0) {
      const auto adopted = tree.adopt(hashes);
      out_ << " adopt " << (adopted ? std::to_string(*adopted) : std::string(to_string(adopted.status())));
    }
    auto found = tree.match(hashes);
    out_ << " match " << found.device_slots.size() << '+' << found.host_tokens;
    if (found.host_tokens > 0) {
      const auto back = tree.load_back(found.host_node, 160);
      out_ << " load " << to_string(back.status());
      if (back) {
        out_ << ' ' << back->device_slots.size();
        const auto from = found.device_slots.size() / 4;
        model_.placed(std::span(hashes).subspan(from), back->device_slots, 4);
        r_.spoil(back->device_slots);
        const auto consumer = TestRank::take(r_.controller->start_loading());
        out_ << " batch " << consumer;
        TestRank::take(r_.controller->layer_counter().set_consumer(consumer));
        TestRank::take(r_.controller->layer_counter().wait_until(1, kPatienceMs));
        if (!r_.holds(back->device_slots, std::span(hashes).subspan(from))) {
          throw std::logic_error("a loaded page holds something else");
        }
        found.device_slots.insert(found.device_slots.end(), back->device_slots.begin(),
                                  back->device_slots.end());
        found.device_node = back->node;
      }
    }
    if (!model_.agrees(hashes, found.device_slots, 4)) throw std::logic_error("a match has wrong slots");
    if (!r_.holds(found.device_slots, hashes)) throw std::logic_error("a matched page holds something else");
    TestRank::take(tree.lock(found.device_node));
    const auto fresh = std::span(hashes).subspan(found.device_slots.size() / 4);
    if (r_.device->available() < fresh.size() * 4) tree.evict(fresh.size() * 4 - r_.device->available());
    if (r_.device->available() >= fresh.size() * 4) {
      auto slots = r_.compute(fresh);
      model_.placed(fresh, slots, 4);
      slots.insert(slots.begin(), found.device_slots.begin(), found.device_slots.end());
      const auto inserted = TestRank::take(tree.insert(hashes, slots, chunked));
      out_ << " insert " << inserted.node << ' ' << inserted.matched_tokens;
      TestRank::take(r_.device->free(inserted.duplicates));
      TestRank::take(tree.lock(inserted.node));
      locked_.push_back(inserted.node);
    }
    TestRank::take(tree.unlock(found.device_node));
  }

  // A request that asks for its pages and is cancelled before they are loaded.
  void abort_load(const std::vector<PrefixHash>& hashes) {
    const auto found = tree_.match(hashes);
    const auto view = tree_.view(found.host_node);
    if (!view || view->host_slots.empty() || view->writing) return;
    const auto held = TestRank::take(r_.controller->hold(view->host_slots));
    out_ << " abort " << held.tokens;
    r_.controller->let_go(held);
  }

  void reset() {
    unlock_all();
    tree_.reset();
    TestRank::take(r_.controller->reset());
    model_.clear();
    out_ << " reset " << r_.controller->epoch();
  }

  void unlock_one() {
    TestRank::take(tree_.unlock(locked_.front()));
    locked_.pop_front();
  }
  void unlock_all() {
    while (!locked_.empty()) unlock_one();
  }

  void verify(const std::string& when) {
    // What a loss interrupted is whole again after the reset, not before.
    if (const Status state = r_.controller->state(); state != Status::ok) {
      throw std::runtime_error(std::string(to_string(state)));
    }
    const std::string wrong = tree_.check();
    if (!wrong.empty()) throw std::logic_error(when + ": " + wrong);
    if (tree_.device_tokens() + r_.device->available() != r_.device->size()) {
      throw std::logic_error(when + ": device slots are lost");
    }
    if (tree_.host_tokens() + r_.controller->host_pages().available() != kHostTokens) {
      throw std::logic_error(when + ": host handles are lost");
    }
    if (r_.controller->host_pages().refused() != 0) {
      throw std::logic_error(when + ": " + r_.controller->host_pages().last_refusal());
    }
  }

  const TestDaemon& daemon_;
  std::uint32_t rank_;
  std::mt19937 random_;  // the same on every rank
  std::mt19937 noise_;
  ControllerRank r_;
  CheckedTree tree_;
  Model model_;
  std::deque<NodeId> locked_;
  std::ostringstream out_;
};

struct Round {
  unsigned seed = 0;
  std::uint32_t steps = 0;
  WritePolicy policy = WritePolicy::write_through;
  TreePolicy eviction = TreePolicy::lru;
  std::uint32_t doomed = kRanks;  // the rank that dies, and when
  std::uint32_t dies_at = ~0u;
  std::function<void(std::uint32_t rank)> prepare = [](std::uint32_t) {};  // in each rank's process

  [[nodiscard]] bool somebody_dies() const { return doomed < kRanks; }
};

// Lets the ranks work. Returns what each has written: its decisions, then perhaps "lost" or "failed: why".
inline std::vector<std::string> play(const TestDaemon& daemon, const Round& round) {
  const Shared<Meeting> meeting;
  std::vector<Child> children;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    children.push_back(Child::run([&, rank] {
      try {
        round.prepare(rank);
        Worker worker(daemon, rank, round.seed, round.policy, round.eviction);
        meeting->ready.fetch_add(1);
        if (!eventually([&] { return meeting->ready.load() == kRanks; })) return 3;
        try {
          worker.run(round.steps, rank == round.doomed ? round.dies_at : ~0u);
        } catch (const std::runtime_error& e) {
          if (std::string(e.what()).find("peer_lost") == std::string::npos) throw;
          worker.reset_after_loss();
          std::printf("lost\n");
        }
        meeting->leaving.fetch_add(1);
        const std::uint32_t expected = round.somebody_dies() ? kRanks - 1 : kRanks;
        eventually([&] { return meeting->leaving.load() >= expected || meeting->failed.load(); });
      } catch (const std::exception& e) {
        meeting->failed.store(true);
        std::printf("failed: %s\n", e.what());
      }
      std::fflush(stdout);
      return 0;
    }));
  }
  std::vector<std::string> said;
  for (Child& child : children) said.push_back(child.read_all(10 * kPatienceMs));
  for (Child& child : children) child.wait();
  return said;
}

// Whether the ranks that live have decided alike, as far as each has come: survivors of a death, or of a rank
// that failed, may notice it in different steps.
inline bool decided_alike(const std::vector<std::string>& said, const Round& round) {
  std::size_t same = ~std::size_t{0};
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    if (rank == round.doomed) continue;
    for (const std::size_t end : {said[rank].find("lost\n"), said[rank].find("failed: "), said[rank].size()})
      same = std::min(same, end);
  }
  const std::uint32_t reference = round.doomed == 0 ? 1 : 0;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    if (rank != round.doomed && said[rank].substr(0, same) != said[reference].substr(0, same)) return false;
  }
  return true;
}

}  // namespace hicache::test
