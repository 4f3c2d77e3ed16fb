// Groups of rank processes that a test lets meet, wait and leave together.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/support/processes.hpp"

namespace hicache::test {

inline void require_clean(const TestDaemon& daemon) {
  const auto run = run_program({program("hicache-dump"), daemon.name(), "--check"});
  INFO(run.out + run.err);
  REQUIRE(run.status.exited_with(0));
}

// Runs `body` as each rank of a group in a process of its own; what each wrote, line by line.
inline std::vector<std::string> run_ranks(std::uint32_t ranks,
                                          const std::function<std::string(std::uint32_t)>& body) {
  std::vector<Child> children;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    children.push_back(Child::run([&, rank] {
      std::string text;
      try {
        text = body(rank);
      } catch (const std::exception& e) {
        text = std::string("failed: ") + e.what();
      }
      std::fwrite(text.data(), 1, text.size(), stdout);
      std::fflush(stdout);
      return 0;
    }));
  }
  std::vector<std::string> said;
  for (Child& child : children) said.push_back(child.read_all());
  return said;
}

struct Gate {
  std::atomic<std::uint32_t> arrived{0};
  std::atomic<std::uint32_t> step{0};
  std::atomic<std::uint32_t> leaving{0};
  // Until all of `count` came.
  void meet(std::uint32_t count) {
    arrived.fetch_add(1);
    while (arrived.load() < count) std::this_thread::yield();
  }
};

// A rank that leaves ends its group: the last thing of every rank is to wait for the others.
class LeaveTogether {
 public:
  LeaveTogether(Gate& gate, std::uint32_t ranks) : gate_(gate), ranks_(ranks) {}
  ~LeaveTogether() {
    gate_.leaving.fetch_add(1);
    eventually([&] { return gate_.leaving.load() >= ranks_; });
  }
  LeaveTogether(const LeaveTogether&) = delete;
  LeaveTogether& operator=(const LeaveTogether&) = delete;

 private:
  Gate& gate_;
  std::uint32_t ranks_;
};

}  // namespace hicache::test
