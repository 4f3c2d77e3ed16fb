#include <algorithm>
#include <utility>
#include <vector>

#include "shm/page_word.hpp"
#include "tools/dump/checker.hpp"

namespace hicache::inspect {
namespace {

FindingId segment_id(FindingKind kind, std::uint32_t segment, std::int64_t difference) {
  return {kind, SectionKind::segments, segment, 0, difference};
}

// A head describes its whole span; every other segment of the span points to it.
void check_head(const CheckContext& c, std::uint32_t i) {
  const SegmentEntry& s = c.t.segments[i];
  const std::uint64_t segment_bytes = get(c.t.header->segment_bytes);
  const std::uint32_t span = get(s.span_segments);
  const std::uint64_t slot_bytes = get(s.slot_bytes);
  const std::uint32_t slots = get(s.slots);
  if (span == 0 || span > c.t.segments.size() - i) {
    c.out.add(segment_id(FindingKind::broken_segment, i, 1), Proof::structure,
              "segment {} heads a span of {} segments, the pool has {}", i, span, c.t.segments.size());
    return;
  }
  if (slot_bytes == 0 || slot_bytes % kPoolAlignment != 0 || slots == 0 ||
      slots > span * segment_bytes / slot_bytes) {
    c.out.add(segment_id(FindingKind::broken_segment, i, 2), Proof::structure,
              "segment {} has {} slots of {} bytes in a span of {} bytes", i, slots, slot_bytes,
              span * segment_bytes);
  }
  if (get(s.used_slots) > slots) {
    c.out.add(segment_id(FindingKind::broken_segment, i, 3), Proof::structure,
              "segment {} uses {} of {} slots", i, get(s.used_slots), slots);
  }
  if (segment_bytes != 0 && i * segment_bytes / kGiB != ((i + span) * segment_bytes - 1) / kGiB) {
    c.out.add(segment_id(FindingKind::broken_segment, i, 7), Proof::structure,
              "the span of segments {} to {} crosses a 1 GiB line of the pool", i, i + span - 1);
  }
  for (std::uint32_t k = i + 1; k < i + span; ++k) {
    const SegmentEntry& part = c.t.segments[k];
    if (get(part.span_head) == i && get(part.size_class) == get(s.size_class)) continue;
    c.out.add(segment_id(FindingKind::broken_segment, k, 4), Proof::structure,
              "segment {} lies in the span of segment {} but points to {} with size class {}", k, i,
              get(part.span_head), get(part.size_class));
    break;
  }
}

void check_segments(const CheckContext& c) {
  for (std::uint32_t i = 0; i < c.t.segments.size(); ++i) {
    const SegmentEntry& s = c.t.segments[i];
    const std::uint32_t head = get(s.span_head);
    if (get(s.size_class) == kNone32) {
      if (head != kNone32 || get(s.used_slots) != 0) {
        c.out.add(segment_id(FindingKind::broken_segment, i, 5), Proof::structure,
                  "segment {} is unused but has span head {} and {} used slots", i, head, get(s.used_slots));
      }
    } else if (head == i) {
      check_head(c, i);
    } else if (head > i || get(c.t.segments[head].span_head) != head ||
               get(c.t.segments[head].span_segments) <= i - head) {
      c.out.add(segment_id(FindingKind::broken_segment, i, 6), Proof::structure,
                "segment {} points to segment {}, whose span does not hold it", i, head);
    }
  }
}

// Where the page's slot must lie. Returns the head segment, or kNone32 after a complaint.
std::uint32_t check_place(const CheckContext& c, std::uint32_t page, const FindingId& id) {
  const PageEntry& p = c.t.pages[page];
  const std::uint64_t offset = get(p.pool_offset);
  const std::uint64_t segment_bytes = get(c.t.header->segment_bytes);
  auto complain = [&](const char* why) {
    c.out.add(id, Proof::structure, "page {} has pool offset {:#x}, {}", page, offset, why);
    return kNone32;
  };
  if (offset % kPoolAlignment != 0) return complain("which is not a multiple of 4096");
  if (segment_bytes == 0 || offset >= get(c.t.header->pool_bytes) ||
      offset / segment_bytes >= c.t.segments.size()) {
    return complain("outside the pool");
  }
  const auto segment = static_cast<std::uint32_t>(offset / segment_bytes);
  const std::uint32_t head = get(c.t.segments[segment].span_head);
  if (get(c.t.segments[segment].size_class) == kNone32 || head > segment) {
    return complain("in a segment that is not assigned");
  }
  const SegmentEntry& s = c.t.segments[head];
  if (get(s.size_class) != get(p.size_class)) {
    c.out.add({FindingKind::wrong_size_class, id.table, id.index, id.generation, 1}, Proof::structure,
              "page {} of size class {} lies in segment {} of size class {}", page, get(p.size_class),
              segment, get(s.size_class));
    return kNone32;
  }
  const NamespaceEntry* ns = c.used_namespace(get(p.namespace_id));
  const std::uint64_t slot_bytes = get(s.slot_bytes);
  if (ns != nullptr && get(ns->slot_bytes) != slot_bytes) {
    return complain("in a segment whose slots are not of its namespace's size");
  }
  const std::uint64_t in_span = offset - head * segment_bytes;
  if (slot_bytes == 0 || in_span % slot_bytes != 0 || in_span / slot_bytes >= get(s.slots)) {
    return complain("which is not the start of a slot");
  }
  return head;
}

}  // namespace

void check_slots(const CheckContext& c) {
  check_segments(c);
  std::vector<std::uint32_t> used(c.t.segments.size());
  std::vector<std::uint32_t> leaving(c.t.segments.size());  // evicting: the slot may be back already
  std::vector<std::pair<std::uint64_t, std::uint32_t>> slots;
  for (std::uint32_t page = 0; page < c.t.pages.size(); ++page) {
    const PageWord word = PageWord::decode(get(c.t.pages[page].word));
    if (word.state == PageState::free || static_cast<std::uint8_t>(word.state) >= kPageStateCount) continue;
    const FindingId id{FindingKind::slot_out_of_place, SectionKind::pages, page, word.generation.value};
    slots.emplace_back(get(c.t.pages[page].pool_offset), page);
    const std::uint32_t head = check_place(c, page, id);
    if (head == kNone32) continue;
    ++(word.state == PageState::evicting ? leaving : used)[head];
  }
  std::sort(slots.begin(), slots.end());
  for (std::size_t i = 1; i < slots.size(); ++i) {
    if (slots[i].first != slots[i - 1].first) continue;
    const std::uint32_t page = slots[i].second;
    c.out.add({FindingKind::duplicate_slot, SectionKind::pages, page,
               PageWord::decode(get(c.t.pages[page].word)).generation.value},
              Proof::structure, "pages {} and {} are in the same slot at pool offset {:#x}",
              slots[i - 1].second, page, slots[i].first);
  }
  for (std::uint32_t i = 0; i < c.t.segments.size(); ++i) {
    const SegmentEntry& s = c.t.segments[i];
    if (get(s.size_class) == kNone32 || get(s.span_head) != i) continue;
    const std::uint32_t counted = get(s.used_slots);
    if (counted >= used[i] && counted - used[i] <= leaving[i]) continue;
    c.out.add(segment_id(FindingKind::wrong_count, i, std::int64_t{counted} - used[i]), Proof::count,
              "segment {} counts {} used slots, {} pages lie in it", i, counted, used[i] + leaving[i]);
  }
}

}  // namespace hicache::inspect
