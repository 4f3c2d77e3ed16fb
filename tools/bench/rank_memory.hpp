// Device memory of a benchmark's rank, wherever it is: registered with a session, filled with the page
// pattern, spoiled, and checked.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "libhicache/include/hicache/client.hpp"
#include "shm/device_geometry.hpp"
#include "shm/namespace_spec.hpp"
#include "shm/status.hpp"

namespace hicache::bench {

// A device page and the key of what it holds.
struct KeyedPage {
  PrefixHash key;
  DevicePage page;
};

struct PatternCheck {
  std::uint64_t words = 0;  // looked at
  std::uint64_t wrong = 0;
  std::uint64_t poison = 0;  // wrong words that were never written since poison(); known for GPUs only
  std::string first;         // where a wrong one is
};

class RankMemory {
 public:
  // cuda: not_found where there is no GPU or CUDA is off, with the reason. Called in the rank's process.
  static Result<std::unique_ptr<RankMemory>> create(DeviceKind kind, const NamespaceSpec& spec,
                                                    std::uint32_t pages);
  RankMemory() = default;
  RankMemory(const RankMemory&) = delete;
  RankMemory& operator=(const RankMemory&) = delete;
  virtual ~RankMemory() = default;

  virtual Outcome register_with(Session& session) = 0;
  // The bytes are there when they return.
  virtual Outcome fill(std::span<const KeyedPage> pages, std::uint32_t shard) = 0;
  virtual Outcome poison(std::span<const KeyedPage> pages) = 0;
  virtual Result<PatternCheck> verify(std::span<const KeyedPage> pages, std::uint32_t shard) = 0;
};

}  // namespace hicache::bench
