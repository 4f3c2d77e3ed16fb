// Pool slots: the pool is cut in segments that belong to one size class at a time and return when they are
// empty, so that namespaces with different page bytes share one pool. A slot larger than a segment takes a
// span of segments.
//
// Thread safety: none; the coordinator's own.
//
// Invariants
//   1. A slot lies in one span, at a multiple of its class's slot bytes, and never crosses a 1 GiB line of
//   the pool.
//   2. The segment table in the control region always shows which class and how many slots a span holds.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "shm/region_layout.hpp"
#include "shm/types.hpp"

namespace hicache::daemon {

class SlotAllocator {
 public:
  // `nodes`: the NUMA node of each segment, the same for all of a 1 GiB piece; empty = no node is better than
  // another.
  SlotAllocator(std::span<SegmentEntry> segments, std::uint64_t segment_bytes,
                std::span<const NumaNode> nodes = {});

  // The class of slots of this size (a multiple of 4 KiB), made on first use. None when such a slot fits
  // nowhere: it is larger than the pool or than 1 GiB.
  SizeClassId class_for(std::uint64_t slot_bytes);
  [[nodiscard]] std::uint64_t slot_bytes(SizeClassId size_class) const {
    return classes_[size_class.value].slot_bytes;
  }
  // Slots of one span of this class.
  [[nodiscard]] std::uint32_t slots_per_span(SizeClassId size_class) const {
    return classes_[size_class.value].slots;
  }

  // A slot, or none when the class has none free and no segments are left. `near`: the slot of the previous
  // page of the request; its neighbour is taken when free, so that requests get consecutive slots where
  // possible. Otherwise one on `node` while that node has any, also by opening a span there; then one
  // anywhere.
  PoolOffset allocate(SizeClassId size_class, PoolOffset near, NumaNode node = NumaNode::none());
  // Takes a slot that a page of an earlier daemon holds. False when it is no slot of this class, is taken
  // already, or lies in a segment of another class.
  bool adopt(SizeClassId size_class, PoolOffset slot);
  // True when allocate would give a slot.
  [[nodiscard]] bool can_allocate(SizeClassId size_class) const;
  // Precondition: the slot is in use.
  void free(SizeClassId size_class, PoolOffset slot);

  // From now on only segments within the pool's first `bytes` are given to a size class. Those that have one
  // keep it.
  void set_usable_bytes(std::uint64_t bytes);
  [[nodiscard]] std::uint64_t usable_bytes() const {
    return std::uint64_t{usable_segments_} * segment_bytes_;
  }

  // Of all segments, usable or not.
  [[nodiscard]] std::uint64_t pool_bytes() const { return table_.size() * segment_bytes_; }
  [[nodiscard]] std::uint64_t used_bytes() const { return used_bytes_; }
  [[nodiscard]] std::uint32_t assigned_segments() const { return assigned_; }

 private:
  struct SizeClass {
    std::uint64_t slot_bytes = 0;
    std::uint32_t span_segments = 1;
    std::uint32_t slots = 0;
    // Heads of spans with free slots, newest last, by home.
    std::vector<std::vector<std::uint32_t>> open;
  };
  struct Span {
    std::vector<std::uint64_t> taken;  // bit per slot
    std::uint32_t used = 0;
    std::uint32_t cursor = 0;            // where to look first
    std::uint32_t open_index = kNone32;  // place in its class's `open` of its home
  };

  // The node's place in nodes_, or kNone32.
  [[nodiscard]] std::uint32_t home_of(NumaNode node) const;
  // Of segments with this home; kNone32 = of any.
  [[nodiscard]] std::uint32_t find_free_run(std::uint32_t segments, std::uint32_t home) const;
  // Head of a span with a free slot, opened where needed, or kNone32.
  std::uint32_t span_with_room(SizeClassId size_class, std::uint32_t home);
  void open_span(SizeClassId size_class, std::uint32_t head);
  void close_span(SizeClass& cls, std::uint32_t head);
  void remove_open(SizeClass& cls, std::uint32_t head);
  PoolOffset take(SizeClassId size_class, std::uint32_t head, std::uint32_t slot);
  [[nodiscard]] PoolOffset offset_of(const SizeClass& cls, std::uint32_t head, std::uint32_t slot) const {
    return PoolOffset{head * segment_bytes_ + slot * cls.slot_bytes};
  }

  std::span<SegmentEntry> table_;
  std::uint64_t segment_bytes_;
  std::uint64_t segments_per_gib_;
  std::vector<NumaNode> nodes_;       // that the pool lies on; only "none" where no node matters
  std::vector<std::uint32_t> homes_;  // of each segment: its node's place in nodes_
  std::vector<SizeClass> classes_;
  std::vector<Span> spans_;  // by head segment
  std::uint32_t free_segments_;
  std::vector<std::uint32_t>
      free_at_home_;  // of them, by home: a node that is full is not searched each time
  std::uint32_t usable_segments_;
  std::uint32_t assigned_ = 0;
  std::uint64_t used_bytes_ = 0;
};

}  // namespace hicache::daemon
