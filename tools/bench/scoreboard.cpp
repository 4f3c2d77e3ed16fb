#include "tools/bench/scoreboard.hpp"

#include <algorithm>

#include "shm/futex.hpp"

namespace hicache::bench {

void RankBoard::fail(std::string_view text) {
  if (message[0] == '\0') {
    const std::size_t n = std::min(text.size(), message.size() - 1);
    std::copy_n(text.data(), n, message.data());
  }
}

void Board::announce() {
  turn.fetch_add(1, std::memory_order_seq_cst);                              // SYNC board-turn
  if (sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(&turn);  // SYNC board-turn
}

void Board::sleep(std::uint32_t seen, std::uint32_t timeout_ms) {
  sleepers.fetch_add(1, std::memory_order_seq_cst);  // SYNC board-turn
  futex_wait(&turn, seen, std::uint64_t{timeout_ms} * 1'000'000);
  sleepers.fetch_sub(1, std::memory_order_relaxed);
}

bool Board::wait_for_start(RankBoard& rank) {
  rank.phase.store(RankPhase::ready, std::memory_order_release);
  announce();
  while (!aborted()) {
    const std::uint32_t seen = turn.load(std::memory_order_seq_cst);
    if (started.load(std::memory_order_acquire) != 0) return true;
    sleep(seen, 100);
  }
  return false;
}

}  // namespace hicache::bench
