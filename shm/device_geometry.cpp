#include "shm/device_geometry.hpp"

#include <algorithm>
#include <string_view>

#include "shm/protocol.hpp"

namespace hicache {
namespace {

// Pages are copied in words, so every piece starts at a word.
constexpr std::uint64_t kPieceAlignment = 8;

constexpr std::size_t kAllocationWireBytes = 4 + 8;
constexpr std::size_t kTensorWireBytes = 4 + 4 + 4 + 8 + 8 + 8;

constexpr std::uint32_t kPoolShift = 16;  // of a tensor's pool in the word of its kind

std::string_view name_of(TensorKind kind) {
  switch (kind) {
    case TensorKind::k:
      return "k";
    case TensorKind::v:
      return "v";
    case TensorKind::latent:
      return "latent";
    case TensorKind::side:
      return "side pool";
  }
  return "unknown kind";
}

bool known(TensorKind kind) {
  return static_cast<std::uint32_t>(kind) <= static_cast<std::uint32_t>(TensorKind::side);
}

bool known(DeviceKind kind) {
  return kind == DeviceKind::host || kind == DeviceKind::cuda;
}

bool known(CudaExport kind) {
  return kind == CudaExport::ipc_handle || kind == CudaExport::posix_fd;
}

template <std::size_t N>
bool all_zero(const std::array<std::uint8_t, N>& bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::uint8_t byte) { return byte == 0; });
}

Outcome refuse(std::string text) {
  return Error{Status::invalid_argument, std::move(text), 0};
}

// Where a tensor's last byte ends, or nothing when that can't be counted in 64 bits.
std::optional<std::uint64_t> end_of(const DeviceTensor& t, std::uint32_t pages) {
  std::uint64_t end = 0;
  if (__builtin_mul_overflow(std::uint64_t{pages} - 1, t.page_stride, &end)) return std::nullopt;
  if (__builtin_add_overflow(end, t.offset, &end)) return std::nullopt;
  if (__builtin_add_overflow(end, t.page_bytes, &end)) return std::nullopt;
  return end;
}

Outcome validate_cuda(const DeviceAllocation& a, std::size_t i, const DeviceAllocation& first) {
  const std::string which = "allocation " + std::to_string(i);
  if (!known(a.export_kind)) {
    return refuse(which + " has export kind " + std::to_string(static_cast<std::uint32_t>(a.export_kind)) +
                  ", expected 1 (ipc handle) or 2 (posix descriptor)");
  }
  if (all_zero(a.gpu_uuid)) return refuse(which + " has no GPU UUID");
  if (a.gpu_uuid != first.gpu_uuid) {
    return refuse(which + " is on another GPU than allocation 0, expected one GPU a rank");
  }
  if (a.export_kind == CudaExport::ipc_handle && all_zero(a.ipc_handle)) {
    return refuse(which + " has an empty ipc handle");
  }
  if (a.base_offset % kPieceAlignment != 0) {
    return refuse(which + " has base offset " + std::to_string(a.base_offset) + ", expected a multiple of 8");
  }
  if (a.bytes > a.base_bytes || a.base_offset > a.base_bytes - a.bytes) {
    return refuse(which + " has " + std::to_string(a.bytes) + " bytes at base offset " +
                  std::to_string(a.base_offset) + ", expected an end within the base's " +
                  std::to_string(a.base_bytes) + " bytes");
  }
  return success();
}

}  // namespace

std::size_t DeviceGeometry::descriptors() const {
  return static_cast<std::size_t>(std::count_if(
      allocations.begin(), allocations.end(), [](const DeviceAllocation& a) { return a.has_descriptor(); }));
}

Outcome DeviceGeometry::validate(const NamespaceSpec& spec) const {
  if (auto outcome = spec.validate(); !outcome) return outcome;
  if (pages == 0) return refuse("geometry has 0 device pages, expected at least 1");
  if (spec.has_states() != (states > 0)) {
    return refuse("geometry has " + std::to_string(states) + " state slots, expected " +
                  (spec.has_states() ? "at least 1 for the trailing pools" : "0 without a trailing pool"));
  }
  if (allocations.empty() || allocations.size() > kMaxAllocations) {
    return refuse("geometry has " + std::to_string(allocations.size()) + " allocations, expected 1 to " +
                  std::to_string(kMaxAllocations));
  }
  for (std::size_t i = 0; i < allocations.size(); ++i) {
    if (!known(allocations[i].kind)) {
      return refuse("allocation " + std::to_string(i) + " has kind " +
                    std::to_string(static_cast<std::uint32_t>(allocations[i].kind)) +
                    ", expected 1 (host) or 2 (cuda)");
    }
    if (allocations[i].bytes == 0) return refuse("allocation " + std::to_string(i) + " has 0 bytes");
    if (allocations[i].kind != device_kind()) {
      return refuse("allocation " + std::to_string(i) + " has another kind than allocation 0, expected one");
    }
    if (allocations[i].kind == DeviceKind::cuda) {
      if (auto outcome = validate_cuda(allocations[i], i, allocations.front()); !outcome) return outcome;
    }
  }
  const std::size_t wanted = spec.tensors();
  if (tensors.size() != wanted) {
    return refuse("geometry has " + std::to_string(tensors.size()) + " tensors, expected " +
                  std::to_string(wanted) + " (one per layer and kind" +
                  (spec.side_pools.empty() ? ")" : ", and those of the side pools)"));
  }
  std::vector<bool> seen(wanted, false);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const DeviceTensor& t = tensors[i];
    const auto wrong = [&](std::string_view field, std::uint64_t value, const std::string& expected) {
      return refuse("tensor " + std::to_string(i) + " (layer " + std::to_string(t.layer) + ", " +
                    std::string(name_of(t.kind)) + "): " + std::string(field) + " is " +
                    std::to_string(value) + ", expected " + expected);
    };
    const bool side = t.kind == TensorKind::side;
    const bool fits_attention = spec.attention == Attention::mha
                                    ? t.kind == TensorKind::k || t.kind == TensorKind::v
                                    : t.kind == TensorKind::latent;
    if (!fits_attention && !side) {
      return wrong("kind", static_cast<std::uint32_t>(t.kind),
                   spec.attention == Attention::mha ? "0 (k) or 1 (v)" : "2 (latent)");
    }
    const std::size_t pools = side ? spec.side_pools.size() : 1;
    if (t.pool >= pools) return wrong("pool", t.pool, "less than " + std::to_string(pools));
    const std::uint32_t layers = side ? spec.side_pools[t.pool].layers : spec.layers;
    if (t.layer >= layers) return wrong("layer", t.layer, "less than " + std::to_string(layers));
    std::size_t place = (t.kind == TensorKind::v ? spec.layers : 0) + std::size_t{t.layer};
    if (side) {
      place += std::size_t{spec.layers} * spec.kinds();
      for (std::size_t pool = 0; pool < t.pool; ++pool) place += spec.side_pools[pool].layers;
    }
    if (seen[place]) return wrong("layer", t.layer, "each layer and kind once, this one came before");
    seen[place] = true;
    if (t.allocation >= allocations.size()) {
      return wrong("allocation", t.allocation, "less than " + std::to_string(allocations.size()));
    }
    const std::uint64_t piece = side ? spec.side_pools[t.pool].piece_bytes : spec.piece_bytes();
    if (t.page_bytes != piece) return wrong("page_bytes", t.page_bytes, std::to_string(piece));
    if (t.page_stride < t.page_bytes) {
      return wrong("page_stride", t.page_stride, "at least page_bytes " + std::to_string(t.page_bytes));
    }
    if (t.offset % kPieceAlignment != 0) return wrong("offset", t.offset, "a multiple of 8");
    if (t.page_stride % kPieceAlignment != 0) return wrong("page_stride", t.page_stride, "a multiple of 8");
    const auto end = end_of(t, holds_states(spec, t) ? states : pages);
    const std::uint64_t bytes = allocations[t.allocation].bytes;
    if (!end) return wrong("offset", t.offset, "an end of the last page that fits 64 bits");
    if (*end > bytes) {
      return wrong(
          "end of the last page", *end,
          "at most the " + std::to_string(bytes) + " bytes of allocation " + std::to_string(t.allocation));
    }
  }
  return success();
}

void DeviceGeometry::encode(WireWriter& out) const {
  out.integer(pages);
  out.integer(states);
  out.integer(static_cast<std::uint32_t>(allocations.size()));
  for (const DeviceAllocation& a : allocations) {
    out.integer(static_cast<std::uint32_t>(a.kind));
    out.integer(a.bytes);
    if (a.kind != DeviceKind::cuda) continue;
    out.raw(a.gpu_uuid);
    out.integer(static_cast<std::uint32_t>(a.export_kind));
    out.raw(a.ipc_handle);
    out.integer(a.base_bytes);
    out.integer(a.base_offset);
  }
  out.integer(static_cast<std::uint32_t>(tensors.size()));
  for (const DeviceTensor& t : tensors) {
    out.integer(t.allocation);
    out.integer(t.layer);
    // One word for both: the largest geometry has to fit one message.
    out.integer(static_cast<std::uint32_t>(t.kind) | (t.pool << kPoolShift));
    out.integer(t.offset);
    out.integer(t.page_stride);
    out.integer(t.page_bytes);
  }
}

DeviceGeometry DeviceGeometry::decode(WireReader& in) {
  DeviceGeometry g;
  g.pages = in.integer<std::uint32_t>();
  g.states = in.integer<std::uint32_t>();
  g.allocations.resize(in.count(kMaxAllocations, kAllocationWireBytes));
  for (DeviceAllocation& a : g.allocations) {
    a.kind = static_cast<DeviceKind>(in.integer<std::uint32_t>());
    a.bytes = in.integer<std::uint64_t>();
    if (!known(a.kind)) in.fail();
    if (a.kind != DeviceKind::cuda) continue;
    in.raw(a.gpu_uuid);
    a.export_kind = static_cast<CudaExport>(in.integer<std::uint32_t>());
    in.raw(a.ipc_handle);
    a.base_bytes = in.integer<std::uint64_t>();
    a.base_offset = in.integer<std::uint64_t>();
    if (!known(a.export_kind)) in.fail();
  }
  g.tensors.resize(in.count(kMaxTensors, kTensorWireBytes));
  for (DeviceTensor& t : g.tensors) {
    t.allocation = in.integer<std::uint32_t>();
    t.layer = in.integer<std::uint32_t>();
    const auto kind_and_pool = in.integer<std::uint32_t>();
    t.kind = static_cast<TensorKind>(kind_and_pool & ((1u << kPoolShift) - 1));
    t.pool = kind_and_pool >> kPoolShift;
    t.offset = in.integer<std::uint64_t>();
    t.page_stride = in.integer<std::uint64_t>();
    t.page_bytes = in.integer<std::uint64_t>();
    if (!known(t.kind)) in.fail();
  }
  return g;
}

}  // namespace hicache
