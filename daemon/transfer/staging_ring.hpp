// The daemon's side of a rank's staging block: slots, and the requests to pack and unpack them.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>

#include "daemon/transfer/planner.hpp"
#include "shm/shared_memory.hpp"
#include "shm/staging_layout.hpp"
#include "shm/status.hpp"

namespace hicache::daemon {

// What the rank is to do with a slot; the slot says in which direction.
struct StagingRequest {
  std::uint32_t first_layer = 0;  // layers [first_layer, end_layer)
  std::uint32_t end_layer = 0;
  std::span<const PagePair> pages;  // at most kStagingChunkPages
};

// Used by one thread. The block's other side is the rank, which may write anything anywhere: what it says can
// spoil its own pages, and nothing else.
class StagingRing {
 public:
  enum class Answer { waiting, done, refused };

  // invalid_argument when the descriptor is no sealed memfd of the right size.
  static Result<StagingRing> map(int fd, std::uint64_t slot_bytes, std::uint32_t blocks);

  [[nodiscard]] std::uint64_t slot_bytes() const { return slot_bytes_; }
  // A free slot for the direction, which becomes taken.
  std::optional<std::uint32_t> take(Direction direction);
  void give_back(std::uint32_t slot);

  // Asks the rank to pack (write) or unpack (load) a taken slot.
  void post(std::uint32_t slot, const StagingRequest& request);
  // Wakes the rank's thread, should it sleep, because a request will follow soon: it looks for one for a
  // while before it sleeps again.
  void rouse();
  // How the slot's request stands.
  [[nodiscard]] Answer answer(std::uint32_t slot) const;
  // Takes a request back. False when the rank has it already: then an answer follows.
  bool withdraw(std::uint32_t slot);

 private:
  StagingRing(Mapping mapping, std::uint64_t slot_bytes, std::uint32_t blocks)
      : mapping_(std::move(mapping)), slot_bytes_(slot_bytes), blocks_(blocks) {}
  [[nodiscard]] StagingBlock& block() const { return *static_cast<StagingBlock*>(mapping_.data()); }

  Mapping mapping_;
  std::uint64_t slot_bytes_;
  std::uint32_t blocks_;
  std::uint64_t next_number_ = 1;
  std::array<std::uint64_t, kStagingSlots> numbers_{};  // of each slot's last request
  std::array<bool, kStagingSlots> taken_{};
};

}  // namespace hicache::daemon
