// The models whose pages the GPU benchmarks move: one rank's share of them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "shm/namespace_spec.hpp"
#include "shm/status.hpp"

namespace hicache::bench {

struct ModelShape {
  const char* name;
  Attention attention;
  std::uint32_t layers;
  std::uint32_t heads;  // KV heads of the rank
  std::uint32_t head_dim;
};

// 8B-tp1, 70B-tp8 (one of the eight ranks), MLA.
const std::vector<ModelShape>& model_shapes();
Result<ModelShape> find_shape(std::string_view name);
// A group of one rank with bf16 pages of this many tokens.
NamespaceSpec make_spec(const ModelShape& shape, std::uint32_t page_tokens);

}  // namespace hicache::bench
