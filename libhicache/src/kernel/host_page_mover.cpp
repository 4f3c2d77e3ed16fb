#include "host_page_mover.hpp"

#include <algorithm>
#include <cstring>

#include "shm/crash_points.hpp"
#include "shm/layer_fences.hpp"

namespace hicache {

Result<std::unique_ptr<PageMover>> HostPageMover::create(const NamespaceSpec& spec,
                                                         const DeviceGeometry& geometry,
                                                         std::span<const int> fds, const Mapping& pool,
                                                         FenceBlock& fences, const PoolGuard& guard) {
  std::unique_ptr<HostPageMover> mover(new HostPageMover(spec, pool, fences, guard));
  for (std::size_t i = 0; i < geometry.allocations.size(); ++i) {
    auto mapping = Mapping::map(fds[i], geometry.allocations[i].bytes, Mapping::Access::read_write, true);
    if (!mapping) return mapping.error();
    mover->allocations_.push_back(std::move(*mapping));
  }
  for (const DeviceTensor& tensor : geometry.tensors) {
    auto* base = static_cast<std::uint8_t*>(mover->allocations_[tensor.allocation].data());
    mover->pieces_.push_back(Piece{base + tensor.offset, tensor.page_stride, tensor.page_bytes,
                                   shard_piece_offset(spec, tensor), announced_with(spec, tensor),
                                   holds_states(spec, tensor)});
  }
  std::stable_sort(mover->pieces_.begin(), mover->pieces_.end(),
                   [](const Piece& a, const Piece& b) { return a.layer < b.layer; });
  return std::unique_ptr<PageMover>(std::move(mover));
}

// One tensor's part of every page.
std::uint64_t HostPageMover::copy(const KernelWork& work, const Piece& piece) {
  std::uint64_t bytes = 0;
  for (const KernelCopy& page : work.pages) {
    const DevicePage place = piece.states ? page.state : page.device;
    if (!place) continue;
    std::uint8_t* device = piece.device + place.value * piece.page_stride;
    std::uint8_t* host = pool_ + page.host.value + piece.shard_offset;
    std::memcpy(work.loads ? device : host, work.loads ? host : device, piece.bytes);
    bytes += piece.bytes;
  }
  return bytes;
}

void HostPageMover::begin(const KernelWork& work) {
  KernelEnd end{work.slot, work.number, Status::ok, 0};
  auto piece = pieces_.begin();
  for (std::uint32_t layer = 0; layer < layers_ && end.status == Status::ok; ++layer) {
    // A layer that was announced can't be taken back; a page that is no longer leased must not be written.
    if (!work.loads && !guard_.ours()) end.status = Status::daemon_lost;
    for (; end.status == Status::ok && piece != pieces_.end() && piece->layer == layer; ++piece)
      end.bytes += copy(work, *piece);
    if (layer + 1 < layers_) HICACHE_CRASH_POINT(kernel_layer_moved);
    if (work.loads && !guard_.ours()) end.status = Status::daemon_lost;
    if (work.fence != kNone32 && end.status == Status::ok) {
      raise_layer(fences_.load[work.fence], layer, work.fence_value);
      if (layer + 1 < layers_) HICACHE_CRASH_POINT(kernel_layer_announced);
    }
  }
  HICACHE_CRASH_POINT(kernel_moved);
  if (end.status != Status::ok && work.fence != kNone32)
    fail_layers(fences_.load[work.fence], layers_, work.fence_value);
  ended_ = end;
}

std::optional<KernelEnd> HostPageMover::next_end() {
  return std::exchange(ended_, std::nullopt);
}

}  // namespace hicache
