// How large a host pool is: asked for in tokens by ratio or in bytes, in whole pages, and never more than the
// machine has. The pool is reserved once for the node, by the daemon; ranks only count slots of it.
//
// Thread safety: pure.
#pragma once

#include <cstdint>

#include "hicache/export.h"
#include "shm/memory_guard.hpp"
#include "shm/namespace_spec.hpp"
#include "shm/status.hpp"

namespace hicache {

struct HostPoolRequest {
  std::uint64_t bytes = 0;          // an absolute size wins over the ratio; 0 = by ratio
  double ratio = 2.0;               // of the device pool
  std::uint64_t device_tokens = 0;  // token slots of the device pool
  std::uint64_t bytes_per_token = 0;
  std::uint32_t page_tokens = 0;
};

struct HostPoolSize {
  std::uint64_t tokens = 0;  // a multiple of page_tokens
  std::uint64_t pages = 0;
  std::uint64_t bytes = 0;
  bool smaller_than_device = false;  // allowed, but then the host tier can't hold what the device holds
};

// Rounded down to whole pages: never more than was asked for. invalid_argument when not even one page fits.
HICACHE_EXPORT Result<HostPoolSize> size_host_pool(const HostPoolRequest& request);

// Bytes of one token over all layers: what a request's bytes_per_token is for this namespace. With
// `all_ranks` that of the whole group: one copy for MLA, a shard a rank for MHA.
HICACHE_EXPORT std::uint64_t bytes_per_token(const NamespaceSpec& spec, bool all_ranks);

}  // namespace hicache
