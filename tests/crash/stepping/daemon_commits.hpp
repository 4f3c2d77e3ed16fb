// What a daemon does to its region, as a list of commits that a test steps through: two ranks of one group
// write, load, fill the pool, die, come back.
#pragma once

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/crash/stepping/local_rank.hpp"
#include "tests/crash/stepping/single_step.hpp"

namespace hicache::test {

constexpr std::uint32_t kTpSize = 2;

// Two ranks of one group inside a daemon.
struct Stage {
  explicit Stage(const daemon::Config& c) : config(c), daemon(c, daemon::RegionOwner::Start::fresh) {
    restart_ranks();
    for (auto& rank : ranks) rank->post_attach(daemon);
    daemon.settle();
    register_buffers();
  }
  void restart_ranks() {
    ranks.clear();
    for (std::uint32_t r = 0; r < kTpSize; ++r)
      ranks.push_back(std::make_unique<LocalRank>(config, small_spec(Attention::mha, kTpSize), r));
  }
  void register_buffers() {
    for (auto& rank : ranks) rank->post_buffers(daemon);
    daemon.settle();
  }
  void reserve(const std::vector<PrefixHash>& hashes) {
    ++sequence;
    for (auto& rank : ranks) rank->post_reserve(sequence, hashes);
  }
  // Takes the answers of one operation from both ranks; keeps the last.
  void answers(Status expected = Status::ok) {
    for (auto& rank : ranks) answer = rank->next();
    if (answer.status != expected)
      throw std::runtime_error("answer: " + std::string(to_string(answer.status)));
  }
  void write(const std::vector<PrefixHash>& hashes) {
    const std::uint32_t first = answer.hits;
    const auto count = static_cast<std::uint32_t>(hashes.size()) - first;
    for (auto& rank : ranks) {
      for (std::uint32_t i = 0; i < count; ++i) rank->fill(i, hashes[first + i]);
      rank->post_copy(Opcode::write, answer.lease, first, count);
    }
  }
  void release() {
    for (auto& rank : ranks) rank->post_release(answer.lease);
  }
  // A whole request, not looked at closely.
  void store(const std::vector<PrefixHash>& hashes) {
    reserve(hashes);
    daemon.settle();
    answers();
    if (answer.hits < hashes.size()) {
      write(hashes);
      daemon.settle();
      answers();
    }
    release();
    daemon.settle();
    answers();
  }
  void control(std::vector<std::string> arguments) {
    daemon.coordinator().inbox.post(
        daemon::ControlRequest{std::move(arguments), [](Status status, const std::string& text) {
                                 if (status != Status::ok) throw std::runtime_error(text);
                               }});
  }

  const daemon::Config config;
  DaemonInside daemon;
  std::vector<std::unique_ptr<LocalRank>> ranks;
  std::uint64_t sequence = 0;
  Completion answer;
};

// A commit of the daemon: made ready, then stepped through.
struct Commit {
  const char* name;
  std::function<void(Stage&)> prepare;
  std::function<void(Stage&)> act;
};

inline void settle(Stage& s) {
  s.daemon.settle();
}

inline const std::vector<Commit>& commits() {
  static const auto short_prompt = prompt(1, 3);
  static const auto long_prompt = prompt(1, 5);
  static const std::vector<Commit> all = {
      {"reserve", [](Stage& s) { s.reserve(short_prompt); }, settle},
      {"admit",
       [](Stage& s) {
         s.answers();
         s.daemon.transfers().hold();
         s.write(short_prompt);
       },
       settle},
      {"publish", [](Stage& s) { s.daemon.transfers().let_go(); }, settle},
      {"release",
       [](Stage& s) {
         s.answers();
         s.release();
       },
       settle},
      {"reserve of ready pages",
       [](Stage& s) {
         s.answers();
         s.reserve(long_prompt);
       },
       settle},
      {"load",
       [](Stage& s) {
         s.answers();
         for (auto& rank : s.ranks) rank->post_copy(Opcode::load, s.answer.lease, 0, s.answer.hits);
       },
       settle},
      {"admit and publish behind ready pages",
       [](Stage& s) {
         for (auto& rank : s.ranks) rank->next();
         s.answer.hits = 3;
         s.write(long_prompt);
       },
       settle},
      {"release of shared pages",
       [](Stage& s) {
         s.answers();
         s.release();
       },
       settle},
      {"evict",
       [](Stage& s) {
         s.answers();
         s.store(prompt(2, 4));
         s.control({"evict", "2"});
       },
       settle},
      {"evict to make room",
       [](Stage& s) {
         s.store(prompt(3, 5));
         s.reserve(prompt(4, 4));
         s.daemon.settle();
         s.answers();
         s.write(prompt(4, 4));
       },
       settle},
      {"death of a rank that fills pages",
       [](Stage& s) {
         s.answers();
         s.release();
         s.daemon.settle();
         s.answers();
         s.daemon.transfers().hold();
         s.reserve(prompt(5, 2));
         s.daemon.settle();
         s.answers();
         s.write(prompt(5, 2));
         s.daemon.settle();
         s.ranks[1]->post_gone(s.daemon, false);
       },
       settle},
      {"detach", [](Stage& s) { s.ranks[0]->post_gone(s.daemon, true); }, settle},
      {"attach",
       [](Stage& s) {
         s.daemon.transfers().let_go();
         s.daemon.settle();
         s.restart_ranks();
         for (auto& rank : s.ranks) rank->post_attach(s.daemon);
       },
       settle},
      {"bump of the weights epoch",
       [](Stage& s) {
         s.register_buffers();
         s.sequence = 0;
         s.store(prompt(3, 5));
         s.control(
             {"namespace", "bump", to_hex(small_spec(Attention::mha, kTpSize).base_digest()).substr(0, 16)});
       },
       settle},
  };
  return all;
}

// All of them, each between two marks.
inline void play(const daemon::Config& config) {
  Stage stage(config);
  for (const Commit& commit : commits()) {
    commit.prepare(stage);
    SteppedProcess::mark();
    commit.act(stage);
    SteppedProcess::mark();
  }
}

}  // namespace hicache::test
