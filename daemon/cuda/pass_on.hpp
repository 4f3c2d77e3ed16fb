// The copies of an exchange from one rank's memory to ranks on other GPUs: they follow what the rank's own
// GPU has brought, on streams of their own, so that its link never waits for them.
#pragma once

#include <cstdint>
#include <vector>

#include "daemon/cuda/driver.hpp"
#include "daemon/transfer/exchange.hpp"
#include "daemon/transfer/peer_plan.hpp"

namespace hicache::daemon {

class GpuMemory;

// Used by the GPU's transfer thread only.
class PassOn {
 public:
  // `pages` are the rank's own, in plan order, and must not change.
  PassOn(const Exchange& exchange, const RankMemory& own, const std::vector<PagePair>& pages,
         std::vector<std::uint32_t> passed, std::vector<PassTarget> targets);

  // Layers [first_layer, end_layer) of pages [first_page, end_page) are on the rank's own stream.
  struct Piece {
    std::uint32_t first_layer = 0;
    std::uint32_t end_layer = 0;
    std::size_t first_page = 0;
    std::size_t end_page = 0;
  };
  void note(const Piece& piece);
  // Whether something was noted that has not been put.
  [[nodiscard]] bool pending() const { return !noted_.empty(); }

  // Puts the copies of all that was noted behind what is on `own_stream` now. `handover` is free for use
  // again afterwards. Also when a copy cannot be put, `last` stands for those that were.
  struct Put {
    CUresult result = CUDA_SUCCESS;
    const char* what = "";
    // Its work so far ends after `own_stream`'s and every copy. Null: the driver can't order streams any
    // more.
    CUstream last = nullptr;
    std::uint64_t bytes = 0;
    std::uint32_t copies = 0;
  };
  Put put(CUstream own_stream, CUevent handover);

 private:
  void put_piece(const Piece& piece, const PassTarget& target, CUstream stream, Put& done);
  CUresult put_copy(const GpuMemory& to, const RankMemory& to_rank, const PeerRun& run,
                    CUstream stream) const;

  const RankMemory& own_;
  std::vector<std::uint32_t> passed_;
  std::vector<DevicePage> from_;  // own page of each of passed_
  std::vector<PassTarget> targets_;
  std::vector<const RankMemory*> memories_;  // of the targets; the exchange keeps them alive
  std::vector<CUstream> streams_;            // of the targets
  std::vector<Piece> noted_;
  std::vector<PeerRun> runs_;  // reused
};

}  // namespace hicache::daemon
