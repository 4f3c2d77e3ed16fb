// Generates multi-turn conversations when there is no trace.
//
// Distribution: `active` conversations run at once; each request takes one of them at random with equal
// chance and asks for its whole history. A conversation starts with one of `system_prompts` prompts of
// `system_pages` pages (prompt n is twice as frequent as prompt n + 1) and has a geometric number of turns
// with mean `mean_turns`. Each turn appends 1 + a geometric number of pages, `mean_turn_pages` in all on
// average: what the user said and the answer to the turn before. It ends early when it would pass
// `max_pages`, and a new one takes its place.
#pragma once

#include <cstdint>

#include "tools/bench/trace_reader.hpp"

namespace hicache::bench {

struct ConversationOptions {
  std::uint64_t seed = 1;  // equal seeds give equal conversations on every machine
  std::uint64_t requests = 1000;
  std::uint32_t active = 24;
  std::uint32_t system_prompts = 8;
  std::uint32_t system_pages = 4;
  double mean_turns = 6;
  double mean_turn_pages = 2;
  std::uint32_t max_pages = 48;
};

BlockRequests generate_conversations(const ConversationOptions& options);

}  // namespace hicache::bench
