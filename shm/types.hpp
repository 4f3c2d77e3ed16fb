// Strong types for everything that is a number in the protocol: a page id is never a byte count.
#pragma once

#include <array>
#include <bit>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <string_view>

namespace hicache {

// An integer that only compares with its own kind. `Tag` makes the kind; `None` is the value that means
// "nothing".
template <class Tag, class Rep, Rep None>
struct StrongId {
  using rep = Rep;
  static constexpr Rep kNoneValue = None;
  Rep value = None;

  constexpr StrongId() = default;
  constexpr explicit StrongId(Rep v) : value(v) {}
  static constexpr StrongId none() { return StrongId{}; }
  [[nodiscard]] constexpr bool is_none() const { return value == None; }
  constexpr explicit operator bool() const { return value != None; }
  friend constexpr auto operator<=>(StrongId, StrongId) = default;
};

// Index of a logical page in the page table.
using PageId = StrongId<struct PageIdTag, std::uint32_t, 0xffffffffu>;
// Index of a namespace in the namespace table.
using NamespaceId = StrongId<struct NamespaceIdTag, std::uint32_t, 0xffffffffu>;
// Index of a client in the client table. Only valid together with its generation.
using ClientSlot = StrongId<struct ClientSlotTag, std::uint32_t, 0xffffffffu>;
// Index of a TP group in the group table.
using GroupSlot = StrongId<struct GroupSlotTag, std::uint32_t, 0xffffffffu>;
// Index of a lease in the lease table.
using LeaseSlot = StrongId<struct LeaseSlotTag, std::uint32_t, 0xffffffffu>;
// Index of a size class of pool slots.
using SizeClassId = StrongId<struct SizeClassIdTag, std::uint32_t, 0xffffffffu>;
// Index of a segment of the pool.
using SegmentId = StrongId<struct SegmentIdTag, std::uint32_t, 0xffffffffu>;
// A NUMA node of this machine, by the kernel's number.
using NumaNode = StrongId<struct NumaNodeTag, std::uint32_t, 0xffffffffu>;
// A page-sized place in a rank's device buffers.
using DevicePage = StrongId<struct DevicePageTag, std::uint32_t, 0xffffffffu>;
// Byte offset into the pool.
using PoolOffset = StrongId<struct PoolOffsetTag, std::uint64_t, ~0ull>;
// How often a page, client or lease entry was taken into use. 0 = never.
using Generation = StrongId<struct GenerationTag, std::uint32_t, 0u>;

// A lease as the client sees it: table slot and generation, so that a late message can't reach the slot's
// next user.
struct LeaseId {
  std::uint64_t value = 0;  // 0 = no lease
  constexpr LeaseId() = default;
  constexpr explicit LeaseId(std::uint64_t v) : value(v) {}
  constexpr LeaseId(LeaseSlot slot, Generation generation)
      : value((std::uint64_t{generation.value} << 32) | slot.value) {}
  [[nodiscard]] constexpr LeaseSlot slot() const { return LeaseSlot{static_cast<std::uint32_t>(value)}; }
  [[nodiscard]] constexpr Generation generation() const {
    return Generation{static_cast<std::uint32_t>(value >> 32)};
  }
  constexpr explicit operator bool() const { return value != 0; }
  friend constexpr auto operator<=>(LeaseId, LeaseId) = default;
};

// 32 raw bytes of a page's SHA-256 chain hash, kept as four little-endian words so that it can be copied in
// and out of shared memory word by word.
struct PrefixHash {
  std::array<std::uint64_t, 4> words{};

  static PrefixHash from_bytes(std::span<const std::uint8_t, 32> bytes) {
    PrefixHash h;
    std::memcpy(h.words.data(), bytes.data(), 32);
    return h;
  }
  [[nodiscard]] std::array<std::uint8_t, 32> bytes() const {
    std::array<std::uint8_t, 32> out{};
    std::memcpy(out.data(), words.data(), 32);
    return out;
  }
  friend constexpr bool operator==(const PrefixHash&, const PrefixHash&) = default;
};
static_assert(sizeof(PrefixHash) == 32);
static_assert(std::endian::native == std::endian::little, "shared layouts are little-endian");

constexpr std::uint64_t kKiB = 1024;
constexpr std::uint64_t kMiB = 1024 * kKiB;
constexpr std::uint64_t kGiB = 1024 * kMiB;
// Alignment of every pool slot and shard: O_DIRECT and io_uring want aligned memory.
constexpr std::uint64_t kPoolAlignment = 4 * kKiB;
constexpr std::size_t kCacheLine = 64;

constexpr std::uint64_t align_up(std::uint64_t value, std::uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// Compares two values of a growing 32-bit timeline: true when `reached` is at or past `target` (distance <
// 2^31).
constexpr bool timeline_reached(std::uint32_t reached, std::uint32_t target) {
  return static_cast<std::int32_t>(reached - target) >= 0;
}

}  // namespace hicache

template <class Tag, class Rep, Rep None>
struct std::hash<hicache::StrongId<Tag, Rep, None>> {
  std::size_t operator()(hicache::StrongId<Tag, Rep, None> id) const noexcept {
    return std::hash<Rep>{}(id.value);
  }
};
