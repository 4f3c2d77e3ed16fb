// A rank process of the GPU benchmarks: a session whose pages lie in GPU memory, one request at a time.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "libhicache/include/hicache/client.hpp"
#include "tools/bench/gpu/gpu_pages.hpp"

namespace hicache::bench {

// Which rank of which engine; left out: the only rank of an engine of its own.
struct GroupPlace {
  std::string engine;
  std::uint32_t tp_rank = 0;
};

class GpuRank {
 public:
  static Result<std::unique_ptr<GpuRank>> attach(const Gpu& gpu, const std::string& socket_path,
                                                 const NamespaceSpec& spec, std::uint32_t pages,
                                                 BufferLayout layout, const GroupPlace& place = {},
                                                 std::uint64_t staging_bytes = AttachOptions().staging_bytes,
                                                 IoBackend io_backend = IoBackend::direct);
  [[nodiscard]] Session& session() { return *session_; }
  [[nodiscard]] const std::string& socket_path() const { return socket_path_; }
  [[nodiscard]] GpuPages& memory() { return *memory_; }
  // How long register_buffers took.
  [[nodiscard]] double register_ms() const { return register_ms_; }

  // Reserve, with the number of leading pages that must be there already.
  Result<LeaseId> reserve(std::span<const PrefixHash> keys, std::uint32_t expected_hits);
  // The same, whatever is there.
  struct Reserved {
    LeaseId lease;
    std::uint32_t hits = 0;
  };
  Result<Reserved> reserve_any(std::span<const PrefixHash> keys);
  Outcome release(LeaseId lease);
  // Waits for an operation of which every page must have been moved.
  Outcome wait(const Result<Ticket>& ticket, std::uint32_t pages);
  // A value for the next load or write fence; they grow.
  std::uint32_t next_fence() { return ++fence_; }

  // Drops all pages that nobody has pinned.
  Outcome clear() const;

 private:
  std::string socket_path_;
  std::unique_ptr<GpuPages> memory_;  // outlives the session that registered it
  std::unique_ptr<Session> session_;
  double register_ms_ = 0;
  std::uint64_t sequence_ = 0;
  std::uint32_t fence_ = 0;
};

// Keys of a made-up request; different ids never share one.
std::vector<PrefixHash> made_up_keys(std::uint64_t id, std::uint32_t count);

}  // namespace hicache::bench
