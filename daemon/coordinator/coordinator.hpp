// The coordinator: the one thread that decides. Only it writes the index, the page table and every other
// table of the control region. It serves the clients' rings in turn and takes requests from the other
// threads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "daemon/config.hpp"
#include "daemon/coordinator/requests.hpp"
#include "shm/process.hpp"
#include "shm/region.hpp"

namespace hicache::daemon {

class CudaPath;
class ShardChecksums;
class StorageTier;

struct CoordinatorOptions {
  Config config;
  Tables tables;          // of a region whose header is complete
  bool takeover = false;  // the tables are an earlier daemon's; otherwise they are zeroed
  std::uint64_t pool_bytes = 0;
  const ShardChecksums* checksums =
      nullptr;                            // with verify: full, what a takeover compares; nullptr = nothing
  std::vector<NumaNode> segment_nodes{};  // of the pool's segments; empty = no node is better than another
  // Pages of a write that are decided, copied and published together: the copies of the first ones run while
  // the next ones are decided, so that thousands of small pages are not waited for one thread.
  std::uint32_t write_block = 2048;
};

// A process that an earlier daemon let map the pool and that lives.
struct PoolMapper {
  ClientSlot client;
  ProcessIdentity process;
};

class Coordinator {
 public:
  explicit Coordinator(const CoordinatorOptions& options);
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  // Where copies go. Must be set before run(); outlives the coordinator's thread.
  void set_transfers(Transfers* transfers);
  // What `status` tells of CUDA; may be left out. As for set_transfers.
  void set_cuda(const CudaPath* cuda);

  // The tier below; without one nothing is fetched or backed up. Must be set before run(); outlives the
  // coordinator's thread.
  void set_storage(StorageTier* storage);

  // Those of the region that was taken over, for somebody who posts a MapperGoneRequest when one has ended.
  // Before run() only.
  [[nodiscard]] std::vector<PoolMapper> pool_mappers() const;

  // Hands a request over; never blocks, from any thread.
  void post(CoordinatorRequest request);

  // The coordinator's thread body: returns after stop(), once the operations in flight have ended or drain_ms
  // passed.
  void run();
  // Asks run() to drain: no new operations, those in flight end first. From any thread.
  void stop(std::uint32_t drain_ms);

  struct Impl;  // its inside: coordinator_impl.hpp

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace hicache::daemon
