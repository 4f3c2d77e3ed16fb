#include "shm/prefix_hash.hpp"

#include <openssl/evp.h>

#include <cstdio>
#include <cstdlib>
#include <limits>

namespace hicache {
namespace {

// A digest that can't be computed can't be answered with an error value anywhere it is needed, and a wrong
// one would be wrong tokens: only a library without SHA-256 or without memory gets here.
void require(bool done) {
  if (done) return;
  std::fputs("hicache: OpenSSL could not compute SHA-256\n", stderr);
  std::abort();
}

// Fetched once: looking the algorithm up again would cost as much as hashing a small page. Never freed,
// because OpenSSL tears itself down at exit before our statics.
const EVP_MD* sha256_algorithm() {
  static const EVP_MD* const algorithm = [] {
    const EVP_MD* fetched = EVP_MD_fetch(nullptr, "SHA256", nullptr);
    require(fetched != nullptr);
    return fetched;
  }();
  return algorithm;
}

// One SHA-256 computation at a time on a context that its thread keeps.
class Sha256 {
 public:
  Sha256() : context_(thread_context()) {
    require(EVP_DigestInit_ex2(context_, sha256_algorithm(), nullptr) == 1);
  }

  Sha256& add(const void* data, std::size_t bytes) {
    require(EVP_DigestUpdate(context_, data, bytes) == 1);
    return *this;
  }
  Sha256& add(std::string_view text) { return add(text.data(), text.size()); }
  Sha256& add_byte(std::uint8_t byte) { return add(&byte, 1); }

  PrefixHash finish() {
    std::array<std::uint8_t, 32> out;
    require(EVP_DigestFinal_ex(context_, out.data(), nullptr) == 1);
    return PrefixHash::from_bytes(out);
  }

 private:
  static EVP_MD_CTX* thread_context() {
    struct Holder {
      EVP_MD_CTX* context = EVP_MD_CTX_new();
      Holder() { require(context != nullptr); }
      Holder(const Holder&) = delete;
      Holder& operator=(const Holder&) = delete;
      ~Holder() { EVP_MD_CTX_free(context); }
    };
    thread_local Holder holder;
    return holder.context;
  }

  EVP_MD_CTX* context_;
};

// One ingredient of a seed: 0 when absent, else 1, the length and the bytes, so that no two lists of
// ingredients have the same preimage.
void add_optional(Sha256& sha, const std::optional<std::string>& value) {
  if (!value) {
    sha.add_byte(0);
    return;
  }
  const std::uint64_t length = value->size();
  sha.add_byte(1).add(&length, sizeof length).add(*value);
}

int hex_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

}  // namespace

PrefixHash hash_page(std::span<const std::uint32_t> tokens, const std::optional<PrefixHash>& prior) {
  Sha256 sha;
  if (prior) sha.add(prior->words.data(), sizeof prior->words);
  return sha.add(tokens.data(), tokens.size_bytes()).finish();
}

std::vector<PrefixHash> hash_chain(std::span<const std::uint32_t> tokens, std::uint32_t page_tokens,
                                   const std::optional<PrefixHash>& seed) {
  std::vector<PrefixHash> hashes;
  if (page_tokens == 0) return hashes;
  const std::size_t pages = tokens.size() / page_tokens;
  hashes.reserve(pages);
  std::optional<PrefixHash> prior = seed;
  for (std::size_t page = 0; page < pages; ++page) {
    prior = hash_page(tokens.subspan(page * page_tokens, page_tokens), prior);
    hashes.push_back(*prior);
  }
  return hashes;
}

Result<std::vector<std::uint32_t>> narrow_tokens(std::span<const std::int64_t> tokens) {
  constexpr std::int64_t kMaxToken = std::numeric_limits<std::uint32_t>::max();
  std::vector<std::uint32_t> out(tokens.size());
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] > kMaxToken) {
      return Error{Status::invalid_argument,
                   "token " + std::to_string(i) + " is " + std::to_string(tokens[i]) + ", expected 0 to " +
                       std::to_string(kMaxToken),
                   0};
    }
    out[i] = static_cast<std::uint32_t>(tokens[i]);
  }
  return out;
}

std::string to_hex(const PrefixHash& hash) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string out;
  out.reserve(64);
  for (const std::uint8_t byte : hash.bytes()) {
    out.push_back(kDigits[byte >> 4]);
    out.push_back(kDigits[byte & 0xf]);
  }
  return out;
}

std::optional<PrefixHash> from_hex(std::string_view text) {
  std::array<std::uint8_t, 32> bytes;
  if (text.size() != 2 * bytes.size()) return std::nullopt;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const int high = hex_value(text[2 * i]);
    const int low = hex_value(text[2 * i + 1]);
    if (high < 0 || low < 0) return std::nullopt;
    bytes[i] = static_cast<std::uint8_t>(high << 4 | low);
  }
  return PrefixHash::from_bytes(bytes);
}

std::int64_t hash_to_int64(const PrefixHash& hash) {
  // Hex text is written most significant digit first.
  return static_cast<std::int64_t>(__builtin_bswap64(hash.words[0]));
}

std::optional<PrefixHash> namespace_seed(const std::optional<std::string>& extra_key,
                                         const std::optional<std::string>& salt) {
  if (!extra_key && !salt) return std::nullopt;
  Sha256 sha;
  sha.add("sglang-cache-namespace-v1");
  add_optional(sha, extra_key);
  add_optional(sha, salt);
  return sha.finish();
}

PrefixHash kv_event_salt_seed(std::string_view salt) {
  Sha256 sha;
  return sha.add("sglang-cache-salt-v1").add_byte(0).add(salt).finish();
}

PrefixHash sha256(std::span<const std::uint8_t> bytes) {
  Sha256 sha;
  return sha.add(bytes.data(), bytes.size()).finish();
}

}  // namespace hicache
