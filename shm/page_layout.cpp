#include "shm/page_layout.hpp"

#include <string>
#include <utility>

namespace hicache {
namespace {

Error bad(std::string text) {
  return Error{Status::invalid_argument, std::move(text), 0};
}

// Nothing when every first token starts a page of the pool.
template <class Shape>
Outcome check_pages(const Shape& shape, const std::vector<std::uint64_t>& first_tokens) {
  if (shape.page_tokens == 0 || shape.slots % shape.page_tokens != 0) {
    return bad("pool of " + std::to_string(shape.slots) + " slots does not consist of pages of " +
               std::to_string(shape.page_tokens) + " tokens");
  }
  for (const std::uint64_t first : first_tokens) {
    if (first % shape.page_tokens != 0 || first >= shape.slots) {
      return bad("first token " + std::to_string(first) + " does not start a page, expected a multiple of " +
                 std::to_string(shape.page_tokens) + " below " + std::to_string(shape.slots));
    }
  }
  return success();
}

}  // namespace

std::uint64_t mha_offset(const MhaShape& s, PageLayout layout, std::uint64_t kv, std::uint64_t layer,
                         std::uint64_t token, std::uint64_t head, std::uint64_t channel) {
  const std::uint64_t page = token / s.page_tokens;
  const std::uint64_t in_page = token % s.page_tokens;
  std::uint64_t row = 0;  // in runs of head_dim elements
  switch (layout) {
    case PageLayout::layer_first:
      row = (layer * s.slots + token) * s.heads + head;
      break;
    case PageLayout::page_first:
      row = (token * s.layers + layer) * s.heads + head;
      break;
    case PageLayout::page_first_direct:
      row = ((page * s.layers + layer) * s.page_tokens + in_page) * s.heads + head;
      break;
    case PageLayout::page_head:
      row = ((page * s.heads + head) * s.page_tokens + in_page) * s.layers + layer;
      break;
  }
  return kv * s.half_bytes() + (row * s.head_dim + channel) * s.item_bytes;
}

Result<std::uint64_t> mla_offset(const MlaShape& s, PageLayout layout, std::uint64_t layer,
                                 std::uint64_t token, std::uint64_t channel) {
  std::uint64_t row = 0;  // in runs of `channels` elements
  switch (layout) {
    case PageLayout::layer_first:
      row = layer * s.slots + token;
      break;
    case PageLayout::page_first:
      row = token * s.layers + layer;
      break;
    case PageLayout::page_first_direct:
      row = (token / s.page_tokens * s.layers + layer) * s.page_tokens + token % s.page_tokens;
      break;
    case PageLayout::page_head:
      return bad("layout page_head does not exist for MLA");
  }
  return (row * s.channels + channel) * s.item_bytes;
}

std::uint64_t mla_kv_split_offset(const MlaShape& s, std::uint64_t layer, std::uint64_t token,
                                  std::uint64_t channel) {
  const std::uint64_t row =
      (token / s.page_tokens * s.layers + layer) * s.page_tokens + token % s.page_tokens;
  return (row * s.channels + channel) * s.item_bytes;
}

Result<std::vector<PageExtent>> mha_page_extents(const MhaShape& s, PageLayout layout,
                                                 const std::vector<std::uint64_t>& first_tokens,
                                                 std::uint64_t split_factor) {
  if (auto outcome = check_pages(s, first_tokens); !outcome) return outcome.error();
  if (split_factor == 0 || s.heads % split_factor != 0) {
    return bad("split factor " + std::to_string(split_factor) + " does not divide " +
               std::to_string(s.heads) + " heads");
  }
  if (split_factor != 1 && layout != PageLayout::page_head) {
    return bad("split factor " + std::to_string(split_factor) + " needs layout page_head, others have 1");
  }
  // What is contiguous: a layer of a page, a group of heads of a page, or half a page.
  const bool by_layer = layout == PageLayout::layer_first;
  const std::uint64_t parts = by_layer ? s.layers : split_factor;
  const std::uint64_t half_page = s.layers * s.page_tokens * s.heads * s.head_dim * s.item_bytes;
  const std::uint64_t bytes = parts == 0 ? 0 : half_page / parts;
  std::vector<PageExtent> extents;
  extents.reserve(first_tokens.size() * parts * 2);
  for (const std::uint64_t first : first_tokens) {
    for (std::uint64_t part = 0; part < parts; ++part) {
      const std::uint64_t layer = by_layer ? part : 0;
      const std::uint64_t head = by_layer ? 0 : part * (s.heads / split_factor);
      for (std::uint64_t kv = 0; kv < 2; ++kv) {
        extents.push_back({mha_offset(s, layout, kv, layer, first, head, 0), bytes});
      }
    }
  }
  return extents;
}

Result<std::vector<PageExtent>> mla_page_extents(const MlaShape& s, PageLayout layout,
                                                 const std::vector<std::uint64_t>& first_tokens) {
  if (auto outcome = check_pages(s, first_tokens); !outcome) return outcome.error();
  const bool by_layer = layout == PageLayout::layer_first;
  const std::uint64_t parts = by_layer ? s.layers : 1;
  const std::uint64_t layer_bytes = s.page_tokens * s.channels * s.item_bytes;
  std::vector<PageExtent> extents;
  extents.reserve(first_tokens.size() * parts);
  for (const std::uint64_t first : first_tokens) {
    for (std::uint64_t layer = 0; layer < parts; ++layer) {
      const auto offset = mla_offset(s, layout, layer, first, 0);
      if (!offset) return offset.error();
      extents.push_back({*offset, by_layer ? layer_bytes : layer_bytes * s.layers});
    }
  }
  return extents;
}

}  // namespace hicache
