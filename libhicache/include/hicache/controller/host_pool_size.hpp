// How large a host pool is: asked for in tokens by ratio or in bytes, in whole pages, and never more than the
// machine has. The pool is reserved once for the node, by the daemon; ranks only count slots of it.
//
// Thread safety: pure but for available_memory, which reads the system's files.
#pragma once

#include <cstdint>
#include <string>

#include "hicache/export.h"
#include "shm/namespace_spec.hpp"
#include "shm/status.hpp"

namespace hicache {

// What is left to the rest of the machine.
constexpr std::uint64_t kHostMemoryReserve = 10ull << 30;

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

// Bytes that one of `ranks` ranks may take of `available`. 0 when the reserve is not there.
HICACHE_EXPORT std::uint64_t host_memory_budget(std::uint64_t available, std::uint32_t ranks = 1);
// no_space with both figures when `requested` is more than the budget.
HICACHE_EXPORT Outcome check_host_memory(std::uint64_t requested, std::uint64_t available,
                                         std::uint32_t ranks = 1);

// Bytes that this process could still take: what the machine has available, or less where a control group of
// this process (version 1 or 2, any level) allows less. `root` is put before /proc and /sys, for tests.
HICACHE_EXPORT Result<std::uint64_t> available_memory(const std::string& root = "");

}  // namespace hicache
