#include "shm/page_keys.hpp"

#include <algorithm>

#include "shm/prefix_hash.hpp"

namespace hicache {
namespace {

std::string file_model(const KeyOwner& owner) {
  std::string model = owner.model;
  std::replace(model.begin(), model.end(), '/', '-');
  return model;
}

std::string number(std::uint32_t n) {
  return "_" + std::to_string(n);
}

std::string layout_name(PageLayout layout) {
  switch (layout) {
    case PageLayout::layer_first:
      return "layer_first";
    case PageLayout::page_first:
      return "page_first";
    case PageLayout::page_first_direct:
      return "page_first_direct";
    case PageLayout::page_head:
      return "page_head";
  }
  return "";
}

}  // namespace

std::string file_key_suffix(const KeyOwner& owner) {
  std::string suffix = "_" + file_model(owner);
  if (owner.attention == Attention::mha) suffix += number(owner.tp_rank) + number(owner.tp_size);
  if (owner.pp_size > 1) suffix += number(owner.pp_size) + number(owner.pp_rank);
  if (owner.cp_size > 1) suffix += "_cp" + std::to_string(owner.cp_rank) + number(owner.cp_size);
  return suffix + ".bin";
}

std::string file_key(const PrefixHash& hash, const KeyOwner& owner) {
  return to_hex(hash) + file_key_suffix(owner);
}

std::vector<std::string> mooncake_keys(const PrefixHash& hash, const KeyOwner& owner, MooncakeNames names,
                                       const std::string& extra_backend_tag) {
  std::string stem = extra_backend_tag.empty() ? "" : extra_backend_tag + "_" + owner.model + "_";
  stem += to_hex(hash);
  const bool newest = names == MooncakeNames::newest;
  const std::string stage = newest && owner.pp_size > 1 ? std::to_string(owner.pp_rank) : "";
  if (owner.attention == Attention::mla) return {stem + (newest ? "_" + stage : "") + "_k"};
  stem += number(owner.tp_rank) + (stage.empty() ? "" : "_" + stage);
  return {stem + "_k", stem + "_v"};
}

std::vector<std::string> hf3fs_keys(const PrefixHash& hash, Attention attention, PageLayout layout) {
  const std::string hex = to_hex(hash);
  if (attention == Attention::mha && layout == PageLayout::page_first) return {hex + "-k", hex + "-v"};
  return {hex};
}

std::string nixl_key(const PrefixHash& hash, const KeyOwner& owner) {
  const std::string stem = to_hex(hash) + "_" + file_model(owner);
  return owner.attention == Attention::mla ? stem : stem + number(owner.tp_rank) + number(owner.tp_size);
}

std::string eic_key(const PrefixHash& hash, const KeyOwner& owner, PageLayout layout) {
  if (owner.attention == Attention::mla) {
    return owner.model + "_mla_att_" + layout_name(layout) + "@sglang_" + to_hex(hash);
  }
  return owner.model + "_mha_attn_" + layout_name(layout) + number(owner.tp_rank) + number(owner.tp_size) +
         "_@sglang_" + to_hex(hash);
}

}  // namespace hicache
