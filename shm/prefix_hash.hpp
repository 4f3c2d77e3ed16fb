// The prefix hash chain: SHA-256 over the previous page's digest and the page's tokens, so that storage can
// be shared with SGLang. Rule: behaviour of SGLang's HiCache `get_hash_str` (0.5.2 and later).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shm/status.hpp"
#include "shm/types.hpp"

namespace hicache {

// Hash of one page. `prior` is the previous page's hash, or a namespace seed, or nothing for the first page.
// Each token adds 4 little-endian bytes.
PrefixHash hash_page(std::span<const std::uint32_t> tokens, const std::optional<PrefixHash>& prior);

// Hashes of all full pages of a token sequence; a partial last page is not hashed. `page_tokens` > 0.
std::vector<PrefixHash> hash_chain(std::span<const std::uint32_t> tokens, std::uint32_t page_tokens,
                                   const std::optional<PrefixHash>& seed = std::nullopt);

// Checks that wide tokens fit 0 ... 2^32-1. Names the first that does not, instead of wrapping it.
Result<std::vector<std::uint32_t>> narrow_tokens(std::span<const std::int64_t> tokens);

// 64 lowercase hex digits and back; from_hex gives nothing for any other text. An empty text is "no prior".
std::string to_hex(const PrefixHash& hash);
std::optional<PrefixHash> from_hex(std::string_view text);

// First 16 hex digits as unsigned 64-bit, reinterpreted as signed (used in KV events).
std::int64_t hash_to_int64(const PrefixHash& hash);

// Seed of a namespace from LoRA id and cache salt (prior of page 0); nothing when both are absent. Absent and
// empty differ, and the two fields do not commute.
std::optional<PrefixHash> namespace_seed(const std::optional<std::string>& extra_key,
                                         const std::optional<std::string>& salt);
// Seed of KV events for salted requests.
PrefixHash kv_event_salt_seed(std::string_view salt);

// SHA-256 of bytes, as four words.
PrefixHash sha256(std::span<const std::uint8_t> bytes);

}  // namespace hicache
