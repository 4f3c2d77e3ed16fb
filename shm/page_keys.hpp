// The names under which storage backends keep a page: SGLang's, so that what it stored can be found, and what
// it finds can be written. Rules: behaviour of SGLang 0.5.2, 0.5.3 and later. The hash is the page's chain
// hash, its model name appears with "-" for each "/".
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "shm/namespace_spec.hpp"
#include "shm/page_layout.hpp"
#include "shm/types.hpp"

namespace hicache {

// What the names hold beside the hash.
struct KeyOwner {
  std::string model;
  Attention attention = Attention::mha;
  std::uint32_t tp_rank = 0;
  std::uint32_t tp_size = 1;
  std::uint32_t pp_rank = 0;
  std::uint32_t pp_size = 1;
  std::uint32_t cp_rank = 0;
  std::uint32_t cp_size = 1;
};

// HiCacheFile: the file's name. MLA pages are equal on all ranks and have no rank in it.
std::string file_key(const PrefixHash& hash, const KeyOwner& owner);
// What file_key() puts behind the hash.
std::string file_key_suffix(const KeyOwner& owner);

// One object for MLA, K and V for MHA.
enum class MooncakeNames : std::uint8_t { v0_5_3, newest };
std::vector<std::string> mooncake_keys(const PrefixHash& hash, const KeyOwner& owner, MooncakeNames names,
                                       const std::string& extra_backend_tag = "");
// With page_first, MHA pages are two objects; else one.
std::vector<std::string> hf3fs_keys(const PrefixHash& hash, Attention attention, PageLayout layout);
std::string nixl_key(const PrefixHash& hash, const KeyOwner& owner);
std::string eic_key(const PrefixHash& hash, const KeyOwner& owner, PageLayout layout);

// Pages that are there as a whole, from the number of leading objects that are there. `per_page` > 0.
constexpr std::size_t whole_pages(std::size_t objects, std::size_t per_page) {
  return objects / per_page;
}

}  // namespace hicache
