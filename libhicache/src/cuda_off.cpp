// What is left of the CUDA interface in a build without a toolkit: it says that it is off, and why.
#include "hicache/cuda.hpp"
#include "kernel/cuda_page_mover.hpp"
#include "staging/staging.hpp"
#include "stream_fences.hpp"

namespace hicache {
namespace {

Error off() {
  return Error{Status::not_found, "CUDA off: " HICACHE_CUDA_OFF_REASON, 0};
}

}  // namespace

Result<CudaAllocation> describe_cuda_allocation(const CudaRange&) {
  return off();
}

Outcome register_cuda_buffers(Session&, std::span<const CudaRange>, std::span<const DeviceTensor>,
                              std::uint32_t, std::uint32_t, std::uint32_t) {
  return off();
}

Result<std::unique_ptr<StreamFences>> StreamFences::create(Session&, FenceBlock*, void*) {
  return off();
}
StreamFences::~StreamFences() = default;
Outcome StreamFences::wait(void*, const A32&, std::uint32_t) const {
  return off();
}
Outcome StreamFences::write(void*, const A32&, std::uint32_t) const {
  return off();
}
void StreamFences::watch() {}

Result<std::unique_ptr<PageMover>> make_cuda_page_mover(const NamespaceSpec&, const DeviceGeometry&,
                                                        std::span<const CudaRange>, const Mapping&,
                                                        FenceBlock&, const PoolGuard&) {
  return off();
}

struct Staging::Impl {
  StagingOffer offer;
};
Result<std::unique_ptr<Staging>> Staging::create(const NamespaceSpec&, const DeviceGeometry&,
                                                 std::span<const CudaRange>, std::uint64_t,
                                                 const ChannelHeader&, const WaitPolicy&) {
  return off();
}
Staging::~Staging() = default;
const StagingOffer& Staging::offer() const {
  return impl_->offer;
}
int Staging::block_fd() const {
  return -1;
}
void Staging::offered() {}
void Staging::start() {}
void Staging::end() {}
bool Staging::idle() const {
  return true;
}
void Staging::let_go() {}

}  // namespace hicache
