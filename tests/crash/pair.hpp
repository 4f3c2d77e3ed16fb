// What the two ranks of the crash matrix's group agree on: one may be another program.
#pragma once

#include "tests/support/test_rank.hpp"

namespace hicache::test {

constexpr const char* kPairEngine = "pair";
inline NamespaceSpec pair_spec() {
  return small_spec(Attention::mha, 2);
}
inline std::vector<PrefixHash> pair_prompt() {
  return prompt(500, 4);
}

}  // namespace hicache::test
