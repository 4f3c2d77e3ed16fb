#include "tools/bench/gpu/model_shapes.hpp"

#include <fmt/format.h>

namespace hicache::bench {

const std::vector<ModelShape>& model_shapes() {
  static const std::vector<ModelShape> shapes{{"8B-tp1", Attention::mha, 32, 8, 128},
                                              {"70B-tp8", Attention::mha, 80, 1, 128},
                                              {"MLA", Attention::mla, 61, 1, 576}};
  return shapes;
}

Result<ModelShape> find_shape(std::string_view name) {
  std::string known;
  for (const ModelShape& shape : model_shapes()) {
    if (name == shape.name) return shape;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", shape.name);
  }
  return Error{Status::invalid_argument, fmt::format("shape {}: expected one of {}", name, known), 0};
}

NamespaceSpec make_spec(const ModelShape& shape, std::uint32_t page_tokens) {
  NamespaceSpec spec;
  spec.model = fmt::format("hicache-bench-{}", shape.name);
  spec.attention = shape.attention;
  spec.dtype = "bfloat16";
  spec.element_bytes = 2;
  spec.page_tokens = page_tokens;
  spec.layers = shape.layers;
  spec.heads_per_shard = shape.heads;
  spec.head_dim = shape.head_dim;
  return spec;
}

}  // namespace hicache::bench
