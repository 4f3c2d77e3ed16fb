// Between the structs of hicache.h and the types of client.hpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>

#include "hicache/client.hpp"
#include "hicache/hicache.h"

namespace hicache::c_abi {

// Sizes of the structs in their first version: a caller can't know less.
constexpr std::uint32_t kNamespaceBytes = 136;
constexpr std::uint32_t kAttachOptionsBytes = 48;
constexpr std::uint32_t kSessionInfoBytes = 64;
constexpr std::uint32_t kResultBytes = 88;
static_assert(sizeof(hicache_namespace) >= kNamespaceBytes &&
              sizeof(hicache_attach_options) >= kAttachOptionsBytes);
static_assert(sizeof(hicache_session_info) >= kSessionInfoBytes && sizeof(hicache_result) >= kResultBytes);

// Checks the size that a caller says its struct has.
Outcome check_size(const void* from, std::uint32_t first_version_bytes, const char* name);

// Copies a size-prefixed struct from a caller who may know fewer or more fields than this library: what the
// caller lacks is zero, what the library lacks must be zero.
template <class T>
Result<T> read_struct(const T* from, std::uint32_t first_version_bytes, const char* name) {
  if (auto checked = check_size(from, first_version_bytes, name); !checked) return checked.error();
  std::uint32_t size = 0;
  std::memcpy(&size, from, sizeof size);
  const auto* bytes = reinterpret_cast<const unsigned char*>(from);
  for (std::uint32_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] != 0) {
      return Error{Status::invalid_argument,
                   std::string(name) + " has a field at byte " + std::to_string(i) +
                       " that this library does not know",
                   0};
    }
  }
  T out{};
  std::memcpy(&out, from, std::min<std::size_t>(size, sizeof(T)));
  return out;
}

// Fills a caller's struct, as much of it as the caller knows. Its size has been checked.
template <class T>
void write_struct(T from, T* out) {
  from.struct_size = out->struct_size;
  std::memcpy(out, &from, std::min<std::size_t>(out->struct_size, sizeof(T)));
}

Result<NamespaceSpec> to_spec(const hicache_namespace* from);
Result<AttachOptions> to_options(const hicache_attach_options* from);
Result<DeviceGeometry> to_geometry(std::span<const hicache_allocation> allocations,
                                   std::span<const hicache_tensor> tensors, std::uint32_t pages);
// `out` has been checked: before anything is taken out of the session for it.
void store_result(const OperationResult& from, hicache_result* out);

// Nothing for HICACHE_PREFETCH_DEFAULT; invalid_argument for a number that is no policy.
Result<std::optional<PrefetchPolicy>> to_prefetch_policy(std::uint32_t policy);

}  // namespace hicache::c_abi
