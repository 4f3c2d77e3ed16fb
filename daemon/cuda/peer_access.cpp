#include "daemon/cuda/peer_access.hpp"

#include <spdlog/spdlog.h>

namespace hicache::daemon {
namespace {

void open(GpuMemory& memory, const std::shared_ptr<Gpu>& from, const std::string& owner) {
  const auto opened = memory.open_in(from);
  if (opened) return;
  spdlog::warn("memory of a rank on {} cannot be opened for {}: {}; ranks of this group load directly", owner,
               uuid_text(from->device().uuid), opened.error().message);
}

}  // namespace

void PeerAccess::introduce(GpuMemory& memory, const std::shared_ptr<Gpu>& gpu,
                           const PrefixHash& namespace_digest) {
  // Held while handles are opened: memory must not go in between.
  const std::lock_guard lock(mutex_);
  for (const Known& known : known_) {
    if (known.digest != namespace_digest || known.gpu->device().index == gpu->device().index) continue;
    open(memory, known.gpu, uuid_text(gpu->device().uuid));
    open(*known.memory, gpu, uuid_text(known.gpu->device().uuid));
  }
  known_.push_back({&memory, gpu, namespace_digest});
}

void PeerAccess::forget(const GpuMemory& memory) {
  const std::lock_guard lock(mutex_);
  std::erase_if(known_, [&](const Known& known) { return known.memory == &memory; });
}

}  // namespace hicache::daemon
