#include "tools/bench/conversations.hpp"

#include <algorithm>
#include <random>
#include <vector>

namespace hicache::bench {
namespace {

// The standard's distributions differ between libraries, its engines do not: everything is derived from raw
// draws.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : engine_(seed) {}
  std::uint32_t below(std::uint32_t n) { return static_cast<std::uint32_t>(engine_() % n); }
  bool chance(double p) { return static_cast<double>(engine_() >> 11) * 0x1p-53 < p; }
  // 1, 2, 3, ... with the given mean (at least 1).
  std::uint32_t geometric(double mean) {
    std::uint32_t n = 1;
    while (n < kLongest && !chance(1.0 / std::max(mean, 1.0))) ++n;
    return n;
  }

 private:
  static constexpr std::uint32_t kLongest = 1000;
  std::mt19937_64 engine_;
};

struct Conversation {
  std::vector<std::uint32_t> blocks;
  std::uint32_t turns_left = 0;
};

class Generator {
 public:
  explicit Generator(const ConversationOptions& options)
      : options_(options),
        dice_(options.seed),
        next_block_(options.system_prompts * options.system_pages),
        active_(std::max(options.active, 1u)) {}

  BlockRequests run() {
    BlockRequests requests;
    requests.reserve(options_.requests);
    while (requests.size() < options_.requests) {
      Conversation& conversation = active_[dice_.below(static_cast<std::uint32_t>(active_.size()))];
      const std::uint32_t added = dice_.geometric(options_.mean_turn_pages);
      if (conversation.turns_left == 0 || conversation.blocks.size() + added > options_.max_pages)
        start(conversation);
      for (std::uint32_t i = 0; i < added && conversation.blocks.size() < options_.max_pages; ++i) {
        conversation.blocks.push_back(next_block_++);
      }
      --conversation.turns_left;
      requests.push_back(conversation.blocks);
    }
    return requests;
  }

 private:
  void start(Conversation& conversation) {
    std::uint32_t prompt = 0;
    while (prompt + 1 < options_.system_prompts && dice_.chance(0.5)) ++prompt;
    conversation.blocks.clear();
    for (std::uint32_t i = 0; i < options_.system_pages; ++i) {
      conversation.blocks.push_back(prompt * options_.system_pages + i);
    }
    conversation.turns_left = dice_.geometric(options_.mean_turns);
  }

  ConversationOptions options_;
  Dice dice_;
  std::uint32_t next_block_;
  std::vector<Conversation> active_;
};

}  // namespace

BlockRequests generate_conversations(const ConversationOptions& options) {
  return Generator(options).run();
}

}  // namespace hicache::bench
