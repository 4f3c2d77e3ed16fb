#include "daemon/coordinator/slot_allocator.hpp"

#include <algorithm>
#include <bit>
#include <cassert>

namespace hicache::daemon {
namespace {
constexpr auto kRelaxed = std::memory_order_relaxed;

void clear_segment(SegmentEntry& entry) {
  entry.size_class.store(kNone32, kRelaxed);
  entry.span_head.store(kNone32, kRelaxed);
  entry.span_segments.store(0, kRelaxed);
  entry.slots.store(0, kRelaxed);
  entry.used_slots.store(0, kRelaxed);
  entry.slot_bytes.store(0, kRelaxed);
}
}  // namespace

SlotAllocator::SlotAllocator(std::span<SegmentEntry> segments, std::uint64_t segment_bytes,
                             std::span<const NumaNode> nodes)
    : table_(segments),
      segment_bytes_(segment_bytes),
      segments_per_gib_(kGiB / segment_bytes),
      spans_(segments.size()),
      free_segments_(static_cast<std::uint32_t>(segments.size())),
      usable_segments_(static_cast<std::uint32_t>(segments.size())) {
  assert(segment_bytes <= kGiB && kGiB % segment_bytes == 0);
  assert(nodes.empty() || nodes.size() == table_.size());
  for (std::size_t i = 0; i < table_.size(); ++i) {
    clear_segment(table_[i]);
    const NumaNode node = nodes.empty() ? NumaNode::none() : nodes[i];
    table_[i].numa_node.store(node.value, kRelaxed);
    if (home_of(node) == kNone32) nodes_.push_back(node);
    homes_.push_back(home_of(node));
  }
  free_at_home_.resize(nodes_.size());
  for (const std::uint32_t home : homes_) ++free_at_home_[home];
}

std::uint32_t SlotAllocator::home_of(NumaNode node) const {
  const auto found = std::find(nodes_.begin(), nodes_.end(), node);
  return found == nodes_.end() ? kNone32 : static_cast<std::uint32_t>(found - nodes_.begin());
}

void SlotAllocator::set_usable_bytes(std::uint64_t bytes) {
  usable_segments_ =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(bytes / segment_bytes_, table_.size()));
}

SizeClassId SlotAllocator::class_for(std::uint64_t slot_bytes) {
  assert(slot_bytes > 0 && slot_bytes % kPoolAlignment == 0);
  for (std::uint32_t i = 0; i < classes_.size(); ++i) {
    if (classes_[i].slot_bytes == slot_bytes) return SizeClassId{i};
  }
  const std::uint64_t span_segments = (slot_bytes + segment_bytes_ - 1) / segment_bytes_;
  if (span_segments > table_.size() || slot_bytes > kGiB) return SizeClassId::none();
  SizeClass cls;
  cls.slot_bytes = slot_bytes;
  cls.span_segments = static_cast<std::uint32_t>(span_segments);
  cls.slots = static_cast<std::uint32_t>(span_segments * segment_bytes_ / slot_bytes);
  cls.open.resize(nodes_.size());
  classes_.push_back(std::move(cls));
  return SizeClassId{static_cast<std::uint32_t>(classes_.size() - 1)};
}

std::uint32_t SlotAllocator::find_free_run(std::uint32_t segments, std::uint32_t home) const {
  if (segments > (home == kNone32 ? free_segments_ : free_at_home_[home])) return kNone32;
  std::uint32_t run = 0;
  for (std::uint32_t i = 0; i < usable_segments_; ++i) {
    if (i % segments_per_gib_ == 0) run = 0;  // no span crosses a 1 GiB line
    const bool free = table_[i].size_class.load(kRelaxed) == kNone32;
    run = free && (home == kNone32 || homes_[i] == home) ? run + 1 : 0;
    if (run == segments) return i + 1 - segments;
  }
  return kNone32;
}

void SlotAllocator::open_span(SizeClassId size_class, std::uint32_t head) {
  SizeClass& cls = classes_[size_class.value];
  for (std::uint32_t i = 0; i < cls.span_segments; ++i) {
    table_[head + i].size_class.store(size_class.value, kRelaxed);
    table_[head + i].span_head.store(head, kRelaxed);
  }
  SegmentEntry& entry = table_[head];
  entry.span_segments.store(cls.span_segments, kRelaxed);
  entry.slots.store(cls.slots, kRelaxed);
  entry.used_slots.store(0, kRelaxed);
  entry.slot_bytes.store(cls.slot_bytes, kRelaxed);
  Span& span = spans_[head];
  span.taken.assign((cls.slots + 63) / 64, 0);
  span.used = 0;
  span.cursor = 0;
  std::vector<std::uint32_t>& open = cls.open[homes_[head]];
  span.open_index = static_cast<std::uint32_t>(open.size());
  open.push_back(head);
  free_segments_ -= cls.span_segments;
  free_at_home_[homes_[head]] -= cls.span_segments;
  assigned_ += cls.span_segments;
}

void SlotAllocator::remove_open(SizeClass& cls, std::uint32_t head) {
  Span& span = spans_[head];
  std::vector<std::uint32_t>& open = cls.open[homes_[head]];
  const std::uint32_t last = open.back();
  open[span.open_index] = last;
  spans_[last].open_index = span.open_index;
  open.pop_back();
  span.open_index = kNone32;
}

void SlotAllocator::close_span(SizeClass& cls, std::uint32_t head) {
  remove_open(cls, head);
  spans_[head].taken.clear();
  for (std::uint32_t i = 0; i < cls.span_segments; ++i) clear_segment(table_[head + i]);
  free_segments_ += cls.span_segments;
  free_at_home_[homes_[head]] += cls.span_segments;
  assigned_ -= cls.span_segments;
}

PoolOffset SlotAllocator::take(SizeClassId size_class, std::uint32_t head, std::uint32_t slot) {
  SizeClass& cls = classes_[size_class.value];
  Span& span = spans_[head];
  std::uint64_t& word = span.taken[slot / 64];
  assert((word >> (slot % 64) & 1) == 0);
  word |= 1ull << (slot % 64);
  ++span.used;
  span.cursor = slot + 1;
  table_[head].used_slots.store(span.used, kRelaxed);
  used_bytes_ += cls.slot_bytes;
  if (span.used == cls.slots) remove_open(cls, head);
  return offset_of(cls, head, slot);
}

std::uint32_t SlotAllocator::span_with_room(SizeClassId size_class, std::uint32_t home) {
  SizeClass& cls = classes_[size_class.value];
  if (home != kNone32 && !cls.open[home].empty()) return cls.open[home].back();
  // A wish for a node opens a span there before another node's open one is taken.
  std::uint32_t head = home == kNone32 ? kNone32 : find_free_run(cls.span_segments, home);
  if (head == kNone32) {
    for (const auto& open : cls.open) {
      if (!open.empty()) return open.back();
    }
    head = find_free_run(cls.span_segments, kNone32);
  }
  if (head != kNone32) open_span(size_class, head);
  return head;
}

PoolOffset SlotAllocator::allocate(SizeClassId size_class, PoolOffset near, NumaNode node) {
  SizeClass& cls = classes_[size_class.value];
  if (near) {
    const std::uint32_t head = table_[near.value / segment_bytes_].span_head.load(kRelaxed);
    if (head != kNone32 && table_[head].size_class.load(kRelaxed) == size_class.value) {
      const auto next = static_cast<std::uint32_t>((near.value - head * segment_bytes_) / cls.slot_bytes) + 1;
      if (next < cls.slots && (spans_[head].taken[next / 64] >> (next % 64) & 1) == 0) {
        return take(size_class, head, next);
      }
    }
  }
  const std::uint32_t head = span_with_room(size_class, home_of(node));
  if (head == kNone32) return PoolOffset::none();
  const Span& span = spans_[head];
  // Next free slot from the cursor on, then from the start: an open span has at least one.
  const std::uint32_t words = static_cast<std::uint32_t>(span.taken.size());
  std::uint32_t from = span.cursor < cls.slots ? span.cursor : 0;
  for (std::uint32_t step = 0; step <= words; ++step) {
    const std::uint32_t w = (from / 64 + step) % words;
    std::uint64_t free_bits = ~span.taken[w];
    if (step == 0) free_bits &= ~0ull << (from % 64);
    if (w == words - 1 && cls.slots % 64 != 0) free_bits &= (1ull << (cls.slots % 64)) - 1;
    if (free_bits != 0)
      return take(size_class, head, w * 64 + static_cast<std::uint32_t>(std::countr_zero(free_bits)));
  }
  assert(false && "an open span has a free slot");
  return PoolOffset::none();
}

bool SlotAllocator::adopt(SizeClassId size_class, PoolOffset slot) {
  const SizeClass& cls = classes_[size_class.value];
  // A slot larger than a segment is alone in its span, so the span begins where the slot does.
  const std::uint64_t head = slot.value / segment_bytes_;
  const std::uint64_t inside = slot.value % segment_bytes_;
  const std::uint64_t index = inside / cls.slot_bytes;
  if (inside % cls.slot_bytes != 0 || index >= cls.slots || head + cls.span_segments > table_.size())
    return false;
  if (head % segments_per_gib_ + cls.span_segments > segments_per_gib_) return false;
  const auto first = static_cast<std::uint32_t>(head);
  if (spans_[first].taken.empty()) {
    for (std::uint32_t i = 0; i < cls.span_segments; ++i) {
      if (table_[first + i].size_class.load(kRelaxed) != kNone32) return false;
    }
    open_span(size_class, first);
  } else if (table_[first].size_class.load(kRelaxed) != size_class.value) {
    return false;
  }
  if (spans_[first].taken[index / 64] >> (index % 64) & 1) return false;
  take(size_class, first, static_cast<std::uint32_t>(index));
  return true;
}

bool SlotAllocator::can_allocate(SizeClassId size_class) const {
  const SizeClass& cls = classes_[size_class.value];
  const bool open =
      std::any_of(cls.open.begin(), cls.open.end(), [](const auto& heads) { return !heads.empty(); });
  return open || find_free_run(cls.span_segments, kNone32) != kNone32;
}

void SlotAllocator::free(SizeClassId size_class, PoolOffset slot_offset) {
  SizeClass& cls = classes_[size_class.value];
  const std::uint32_t head = table_[slot_offset.value / segment_bytes_].span_head.load(kRelaxed);
  assert(head != kNone32);
  Span& span = spans_[head];
  const auto slot = static_cast<std::uint32_t>((slot_offset.value - head * segment_bytes_) / cls.slot_bytes);
  std::uint64_t& word = span.taken[slot / 64];
  assert(word >> (slot % 64) & 1);
  word &= ~(1ull << (slot % 64));
  --span.used;
  table_[head].used_slots.store(span.used, kRelaxed);
  used_bytes_ -= cls.slot_bytes;
  if (span.open_index == kNone32) {
    std::vector<std::uint32_t>& open = cls.open[homes_[head]];
    span.open_index = static_cast<std::uint32_t>(open.size());
    open.push_back(head);
  }
  if (span.used == 0) close_span(cls, head);
}

}  // namespace hicache::daemon
