// The sleep-and-kick protocol of the rings (SYNC park in shm/waiting.hpp), checked over every interleaving of
// a producer and a sleeper, each with a store buffer as x86 has it: a store reaches memory some time later,
// unless a full fence waits for it.
//
// Property: no lost wake-up. Whatever the order, there is no state in which nothing can happen any more while
// something that was published has not been taken.
#include <array>
#include <cstdint>
#include <set>
#include <vector>

#include "tests/support/catch.hpp"

namespace {

constexpr std::uint8_t kItems = 3;

enum Word : std::uint8_t { kPublished, kSleeping, kWords };
enum class Bell { event_fd, futex };  // how the coordinator is kicked, how a client is

struct Protocol {
  Bell bell = Bell::event_fd;
  bool sleeper_fences = true;
  bool producer_fences = true;
  bool looks_again = true;
};

struct Store {
  Word word;
  std::uint8_t value;
  friend auto operator<=>(const Store&, const Store&) = default;
};

enum Thread : std::uint8_t { kProducer, kSleeper };

struct State {
  std::array<std::uint8_t, kWords> memory{};
  std::array<std::vector<Store>, 2> buffers;
  std::uint8_t producer_at = 0;
  std::uint8_t sent = 0;
  std::uint8_t sleeper_at = 0;
  std::uint8_t taken = 0;
  std::uint8_t bell = 0;       // rings: system calls act on memory at once
  std::uint8_t bell_seen = 0;  // futex: value that the sleep expects
  friend auto operator<=>(const State&, const State&) = default;

  [[nodiscard]] std::uint8_t load(Thread thread, Word word) const {
    const auto& own = buffers[thread];
    for (std::size_t i = own.size(); i-- > 0;) {
      if (own[i].word == word) return own[i].value;
    }
    return memory[word];
  }
};

class Explorer {
 public:
  explicit Explorer(const Protocol& protocol) : protocol_(protocol) {}

  // True when some order of events loses a wake-up.
  bool loses_wakeups() {
    std::vector<State> open{State{}};
    seen_.insert(open.front());
    while (!open.empty()) {
      const State state = open.back();
      open.pop_back();
      next_.clear();
      step_buffers(state);
      step_producer(state);
      step_sleeper(state);
      if (next_.empty() && state.taken < kItems) return true;
      for (State& next : next_) {
        if (seen_.insert(next).second) open.push_back(std::move(next));
      }
    }
    return false;
  }
  [[nodiscard]] std::size_t states() const { return seen_.size(); }

 private:
  void step_buffers(const State& state) {
    for (const Thread thread : {kProducer, kSleeper}) {
      if (state.buffers[thread].empty()) continue;
      State next = state;
      next.memory[state.buffers[thread].front().word] = state.buffers[thread].front().value;
      next.buffers[thread].erase(next.buffers[thread].begin());
      next_.push_back(std::move(next));
    }
  }

  void step_producer(const State& state) {
    State next = state;
    switch (state.producer_at) {
      case 0:  // publish
        if (state.sent == kItems) return;
        ++next.sent;
        next.buffers[kProducer].push_back({kPublished, next.sent});
        next.producer_at = 1;
        break;
      case 1:  // full fence
        if (protocol_.producer_fences && !state.buffers[kProducer].empty()) return;
        next.producer_at = 2;
        break;
      case 2:  // read the flag
        next.producer_at = state.load(kProducer, kSleeping) != 0 ? 3 : 0;
        break;
      default:  // kick
        ++next.bell;
        next.producer_at = 0;
    }
    next_.push_back(std::move(next));
  }

  void step_sleeper(const State& state) {
    State next = state;
    const std::uint8_t published = state.load(kSleeper, kPublished);
    switch (state.sleeper_at) {
      case 0:  // serve what there is
        if (published > state.taken) {
          next.taken = published;
        } else {
          next.sleeper_at = 1;
        }
        break;
      case 1:  // "sleeping"
        next.buffers[kSleeper].push_back({kSleeping, 1});
        next.sleeper_at = 2;
        break;
      case 2:  // the futex value that the sleep will expect
        next.bell_seen = state.bell;
        next.sleeper_at = 3;
        break;
      case 3:  // full fence
        if (protocol_.sleeper_fences && !state.buffers[kSleeper].empty()) return;
        next.sleeper_at = 4;
        break;
      case 4:  // look again
        next.sleeper_at = protocol_.looks_again && published > state.taken ? 6 : 5;
        break;
      case 5:  // asleep, without a time-out: the protocol must not need it
        if (protocol_.bell == Bell::futex) {
          if (state.bell == state.bell_seen) return;
        } else {
          if (state.bell == 0) return;
          next.bell = 0;
        }
        next.sleeper_at = 6;
        break;
      default:  // awake
        next.buffers[kSleeper].push_back({kSleeping, 0});
        next.sleeper_at = 0;
    }
    next_.push_back(std::move(next));
  }

  const Protocol protocol_;
  std::set<State> seen_;
  std::vector<State> next_;
};

}  // namespace

TEST_CASE("no order of events loses a wake-up, with the coordinator's eventfd and the client's futex") {
  for (const Bell bell : {Bell::event_fd, Bell::futex}) {
    Explorer explorer(Protocol{bell, true, true, true});
    CHECK_FALSE(explorer.loses_wakeups());
    CHECK(explorer.states() > 500);
  }
}

TEST_CASE("each part of the protocol is needed: without it some order loses a wake-up") {
  for (const Bell bell : {Bell::event_fd, Bell::futex}) {
    CHECK(Explorer(Protocol{bell, false, true, true}).loses_wakeups());
    CHECK(Explorer(Protocol{bell, true, false, true}).loses_wakeups());
    CHECK(Explorer(Protocol{bell, true, true, false}).loses_wakeups());
  }
}
